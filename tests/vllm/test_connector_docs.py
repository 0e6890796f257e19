"""What docs/ says of the connector is what the code says."""

import json
import re
from pathlib import Path

from hybridkv.adapters.vllm.dashboard import dashboard
from hybridkv.adapters.vllm.metrics import METRICS, PREFIX
from hybridkv.adapters.vllm.settings import describe

DOCS = Path(__file__).parents[2] / "docs"


def test_the_dashboard_of_the_docs_is_the_one_that_is_made():
    assert (DOCS / "vllm-dashboard.json").read_text() == dashboard()


def test_the_dashboard_shows_every_metric_and_none_else():
    queries = " ".join(
        target["expr"] for panel in json.loads(dashboard())["panels"] for target in panel["targets"]
    )
    shown = {name.removesuffix("_total") for name in re.findall(rf"{PREFIX}(\w+)", queries)}
    assert shown == set(METRICS)


def test_the_page_lists_every_key_with_default_and_unit():
    page = (DOCS / "vllm.md").read_text()
    for row in describe():
        assert f"| `{row.name}` | {row.default or 'required'} | {row.unit} | {row.meaning} |" in page, (
            row.name
        )


def test_the_page_lists_every_metric():
    page = (DOCS / "vllm.md").read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.label} | {metric.meaning} |" in page, name
