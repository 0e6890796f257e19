"""The demonstration: one small multi-turn trace, three models, a prefix-only cache beside hybridkv."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rich.table import Table

from hybridkv.plan.boundaries import Retention
from hybridkv.sim.generate import generate_trace
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.report import ReplayReport
from hybridkv.sim.trace import TraceRequest
from hybridkv.specs.full import Full
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import find_layout
from hybridkv.units import format_bytes

MODELS = ("gpt-oss-120b", "gemma-3-27b", "qwen3-next-80b")
SCALE = Fraction(1, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One cache on one model's layout."""

    model: str
    cache: str
    report: ReplayReport


def prefix_only(layout: Layout) -> Layout:
    """Return the layout as a prefix-only cache treats it: every group as if it read the whole prefix."""
    groups = [
        replace(group, spec=Full(block_size=group.spec.block_size), shards=1, lookahead=0)
        for group in layout.groups
    ]
    return replace(layout, groups=tuple(groups))


def demo_trace() -> tuple[TraceRequest, ...]:
    """Return the demo's requests."""
    return generate_trace(seed=7, num_sessions=12)


def run_demo(requests: Sequence[TraceRequest], store_uri: str) -> Iterator[DemoRow]:
    """Replay the trace with real bytes for each model and cache, yielding a row as it is done."""
    caches: list[tuple[str, Retention]] = [("prefix-only", "all"), ("hybridkv", "all"), ("hybridkv", 0)]
    for model in MODELS:
        layout = find_layout(model)
        for cache, retention in caches:
            settings = ReplaySettings(
                layout=prefix_only(layout) if cache == "prefix-only" else layout,
                store_uri=store_uri,
                retention=retention,
                tails="continued",
                move_bytes=True,
                payload_scale=SCALE,
            )
            label = cache if cache == "prefix-only" else f"{cache}, retention {retention}"
            yield DemoRow(model=model, cache=label, report=Replay(settings).run(requests))


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """Return the rows as a table for a terminal."""
    table = Table("model", "cache", title="One chat trace, real bytes, every loaded block verified")
    for title in ("prompt tokens", "hit", "stored", "loaded", "keys asked / request"):
        table.add_column(title, justify="right")
    for row in rows:
        report = row.report
        table.add_row(
            row.model,
            row.cache,
            f"{report.prompt_tokens:,}",
            f"{report.hit_rate:.1%}",
            format_bytes(report.stored_bytes),
            format_bytes(sum(group.loaded_bytes for group in report.groups)),
            f"{report.keys_asked / report.requests:,.0f}",
            end_section=row.cache.endswith(" 0"),
        )
    return table
