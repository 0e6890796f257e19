"""How long a replay of a whole trace takes, what its lookups ask, and where its time goes.

    python benchmarks/replay.py TRACE [--json FILE] [--page FILE]

Times are of this machine; the profile is given as shares. Bytes are not moved.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridkv.plan.boundaries import Retention
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.report import ReplayReport
from hybridkv.sim.trace import TraceRequest, read_trace
from hybridkv.specs.layout_file import find_layout

MODELS = ("deepseek-v4", "gpt-oss-120b", "gemma-3-27b")
RETENTIONS: tuple[Retention, ...] = (0, "all")
STORE = "memory://?capacity=64GiB"
MARKER = "<!-- replay -->"
PROFILED = "gpt-oss-120b"
TOP = 8


def replayed(requests: Sequence[TraceRequest], model: str, retention: Retention) -> ReplayReport:
    """Replay the trace without bytes."""
    settings = ReplaySettings(layout=find_layout(model), store_uri=STORE, retention=retention)
    return Replay(settings).run(requests)


def measured(requests: Sequence[TraceRequest]) -> Iterator[dict[str, object]]:
    """Yield seconds, hits and keys of each model and retention."""
    for model in MODELS:
        for retention in RETENTIONS:
            start = time.perf_counter()
            report = replayed(requests, model, retention)
            yield {
                "model": model,
                "retention": retention,
                "seconds": round(time.perf_counter() - start, 1),
                "hit_rate": report.hit_rate,
                "keys_per_request": report.keys_asked / report.requests,
                "useful_keys_per_request": report.keys_useful / report.requests,
                "round_trips_per_request": report.round_trips / report.requests,
            }


def profiled(requests: Sequence[TraceRequest]) -> list[dict[str, object]]:
    """Return the functions that take most time of their own, with their share of all."""
    profile = cProfile.Profile()
    profile.runcall(replayed, requests, PROFILED, "all")
    entries = pstats.Stats(profile).get_stats_profile()
    ranked = sorted(entries.func_profiles.items(), key=lambda item: -item[1].tottime)[:TOP]
    return [
        {
            "function": f"{Path(entry.file_name).name}: {name}" if entry.file_name != "~" else name,
            "share": entry.tottime / entries.total_tt,
        }
        for name, entry in ranked
    ]


def page_lines(runs: Sequence[dict[str, object]], profile: Sequence[dict[str, object]]) -> Iterator[str]:
    """Yield the docs page's tables."""
    titles = (
        "model",
        "retention",
        "seconds",
        "hit",
        "keys a request",
        "of them loaded",
        "round trips a request",
    )
    yield f"| {' | '.join(titles)} |"
    yield "|---|---|---|---|---|---|---|"
    for run in runs:
        yield (
            f"| {run['model']} | {run['retention']} | {run['seconds']} | {run['hit_rate']:.1%} "
            f"| {run['keys_per_request']:.1f} | {run['useful_keys_per_request']:.1f} "
            f"| {run['round_trips_per_request']:.1f} |"
        )
    yield ""
    yield f"Own time of the functions that take most of it ({PROFILED}, retention all, under the profiler):"
    yield ""
    yield "| function | share |"
    yield "|---|---|"
    for entry in profile:
        yield f"| `{entry['function']}` | {entry['share']:.0%} |"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help=f"put the tables below {MARKER} into this docs page")
    settings = parser.parse_args()
    requests = read_trace(settings.trace).requests
    runs = list(measured(requests))
    profile = profiled(requests)
    lines = list(page_lines(runs, profile))
    print("\n".join(lines))
    if settings.json:
        settings.json.write_text(
            json.dumps({"store": STORE, "runs": runs, "profile": profile}, indent=1) + "\n"
        )
    if settings.page:
        before, _ = settings.page.read_text().split(MARKER)
        settings.page.write_text("\n".join([before + MARKER, "", *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
