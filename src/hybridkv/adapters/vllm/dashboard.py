"""The Grafana dashboard of the metrics, made from their table so that it names none that is not there."""

import json
from collections.abc import Iterator

from hybridkv.adapters.vllm.metrics import METRICS, PREFIX

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24

_PANELS: tuple[tuple[str, str, str], ...] = (
    ("Tokens loaded instead of computed", "short", "rate:hit_tokens"),
    ("Lookups by ending", "ops", "rate:lookups"),
    ("Time of a lookup", "s", "ratio:lookup_seconds/lookups"),
    ("Keys asked for one lookup", "short", "ratio:lookup_keys/lookups"),
    ("Keys asked that were then loaded", "percentunit", "ratio:lookup_useful_keys/lookup_keys"),
    ("Round trips of one lookup", "short", "ratio:lookup_calls/lookups"),
    ("Loads", "ops", "rate:loads"),
    ("Loads that failed", "ops", "rate:failed_loads"),
    ("Objects stored", "ops", "rate:stored_objects"),
    ("Bytes moved", "Bps", "rate:store_bytes"),
    ("Bandwidth inside store calls", "Bps", "ratio:store_bytes/store_seconds"),
    ("Store calls", "ops", "rate:store_calls"),
    ("Keys of store calls", "ops", "rate:store_keys"),
    ("Results of the store", "ops", "rate:store_results"),
    ("Store calls that failed", "ops", "rate:store_failures"),
    ("Blocks pinned by jobs", "short", "now:pinned_blocks"),
    ("Saves that waited for pinned blocks", "ops", "rate:cut_saves"),
    ("Jobs under way", "short", "now:jobs"),
    ("Saves in queue", "short", "now:queued_saves"),
    ("Loads in queue", "short", "now:queued_loads"),
    ("Staging memory in use", "bytes", "now:staging_bytes"),
    ("Blocks that vLLM allocated otherwise than planned (bugs)", "ops", "rate:unfilled_blocks"),
    ("Requests left alone after an error (bugs)", "ops", "rate:errors"),
)
"""Title, Grafana's unit, and what is shown: the rate, the present value, or a ratio of two rates."""


def dashboard() -> str:
    """Return the dashboard as Grafana imports it, JSON."""
    panels = [_panel(idx, *panel) for idx, panel in enumerate(_PANELS)]
    return (
        json.dumps(
            {
                "title": "hybridkv in vLLM",
                "uid": "hybridkv-vllm",
                "schemaVersion": 39,
                "refresh": "10s",
                "time": {"from": "now-30m", "to": "now"},
                "templating": {"list": list(_variables())},
                "panels": panels,
            },
            indent=1,
        )
        + "\n"
    )


def _variables() -> Iterator[dict[str, object]]:
    yield {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    yield {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values({PREFIX}lookups_total, model_name)",
        "includeAll": True,
        "multi": True,
    }


def _panel(idx: int, title: str, unit: str, shown: str) -> dict[str, object]:
    how, _, what = shown.partition(":")
    first, _, second = what.partition("/")
    label = METRICS[first].label
    if how == "now":
        query = f"sum by (engine{_and(label)}) ({_series(first)})"
    elif how == "rate":
        query = _rate(first, label)
    else:
        label = label if METRICS[second].label == label else ""
        query = f"{_rate(first, label)} / {_rate(second, label)}"
    return {
        "id": idx + 1,
        "type": "timeseries",
        "title": title,
        "description": METRICS[first].meaning,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {
            "x": idx * _WIDTH % _COLUMNS,
            "y": idx * _WIDTH // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": "A", "expr": query, "legendFormat": f"{{{{{label}}}}}" if label else "{{engine}}"}
        ],
    }


def _series(name: str) -> str:
    suffix = "" if METRICS[name].is_gauge else "_total"
    return f'{PREFIX}{name}{suffix}{{model_name=~"$model"}}'


def _rate(name: str, label: str) -> str:
    return f"sum by (engine{_and(label)}) (rate({_series(name)}[$__rate_interval]))"


def _and(label: str) -> str:
    return f", {label}" if label else ""


if __name__ == "__main__":
    print(dashboard(), end="")  # noqa: T201 - made to be redirected into docs/
