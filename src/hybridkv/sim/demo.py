"""The demonstration: one chat, three models, a prefix-only cache beside hybridkv at equal capacity."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from hybridkv.plan.boundaries import Retention
from hybridkv.sim.generate import generate_trace
from hybridkv.sim.pair import EnginePair
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.report import ReplayReport
from hybridkv.sim.trace import TraceRequest
from hybridkv.specs.full import Full
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import find_layout
from hybridkv.units import format_bytes

MODELS = ("gpt-oss-120b", "qwen3-next-80b", "deepseek-v4")
SCALE = Fraction(1, 256)
CAPACITY_SHARE = 8

_CACHES: tuple[tuple[str, Retention], ...] = (
    ("prefix-only", "all"),
    ("hybridkv, retention all", "all"),
    ("hybridkv, retention 0", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One cache on one model's layout."""

    cache: str
    capacity_bytes: int
    report: ReplayReport


def prefix_only(layout: Layout) -> Layout:
    """Return the layout as a prefix-only cache treats it: every group as if it read the whole prefix."""
    groups = [
        replace(group, spec=Full(block_size=group.spec.block_size), shards=1) for group in layout.groups
    ]
    return replace(layout, groups=tuple(groups))


def run_demo() -> Iterator[DemoRow]:
    """Replay one trace for each model and cache, with real bytes, yielding a row as it is done.

    Two engine processes serve its requests in turn and share one directory of the local store. Every cache of
    a model has an eighth of what the prefix-only one would write into an unbounded store.
    """
    requests = _requests()
    with EnginePair(_requests) as engines:
        for model in MODELS:
            layout = find_layout(model)
            unbounded = Replay(_settings(prefix_only(layout), "memory://", "all", move_bytes=False))
            capacity_bytes = unbounded.run(requests).stored_bytes // CAPACITY_SHARE
            for cache, retention in _CACHES:
                kept = prefix_only(layout) if cache == "prefix-only" else layout
                with tempfile.TemporaryDirectory(dir=_fast_directory()) as directory:
                    uri = f"local://{directory}/store?capacity={capacity_bytes}"
                    report = engines.replay(_settings(kept, uri, retention, move_bytes=True))
                yield DemoRow(cache=cache, capacity_bytes=capacity_bytes, report=report)


def _requests() -> list[TraceRequest]:
    return list(generate_trace(seed=7, num_sessions=40, num_apps=4))


def _settings(layout: Layout, uri: str, retention: Retention, *, move_bytes: bool) -> ReplaySettings:
    return ReplaySettings(
        layout=layout,
        store_uri=uri,
        retention=retention,
        tails="continued",
        move_bytes=move_bytes,
        payload_scale=SCALE,
    )


def _fast_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - tmpfs, where there is one


def demo_table(rows: Sequence[DemoRow]) -> RenderableType:
    """Return the rows as a table for a terminal, with what it shows."""
    table = Table("model and capacity", "cache")
    for title in ("hit", "written", "loaded", "keys asked"):
        table.add_column(title, justify="right")
    for idx, row in enumerate(rows):
        report, place = row.report, idx % len(_CACHES)
        table.add_row(
            (report.model, format_bytes(row.capacity_bytes), "")[place],
            row.cache,
            f"{report.hit_rate:.1%}",
            format_bytes(report.stored_bytes),
            format_bytes(sum(group.loaded_bytes for group in report.groups)),
            f"{report.keys_asked / report.requests:,.0f} a request",
            end_section=place == len(_CACHES) - 1,
        )
    report = rows[0].report
    return Group(
        f"{report.requests} requests of a generated chat, {report.prompt_tokens:,} prompt tokens, real bytes",
        f"at {SCALE} of their size, every loaded object verified; one capacity per model.",
        "Two engine processes serve the requests in turn and share one directory of the local store.",
        table,
        "hit: share of the prompt tokens that need no prefill",
        "prefix-only: keeps, asks and loads every layer as if it were full attention",
        "retention all: every boundary can be resumed; 0: only ends of prompts and where they branch",
    )
