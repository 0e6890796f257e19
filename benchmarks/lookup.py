"""Lookup cost beside vLLM 0.32's in-tree Mooncake connector: keys, round trips, hits and time.

Both sides run in one process and one run, taking turns, on the same block hashes and on equal contents,
against a set in memory and against a real Mooncake master with a storage node of its own on loopback. Times
are medians, and only their ratios mean something on another machine. vLLM's classes are driven unchanged
(``vllm_peer.py``); the hop from its scheduler to its lookup server is left out on its side.

    python benchmarks/lookup.py [--long] [--json FILE] [--page FILE] [--plot FILE]

Exit code 1 when a hit or a count of keys misses its target; times are reported.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from hybridkv.keys import KeyScheme, Namespace
from hybridkv.plan.boundaries import Retention
from hybridkv.plan.save import plan_save
from hybridkv.service.lookup import LookupDriver, LookupOutcome
from hybridkv.specs.layout import Layout
from lookup_layouts import ROWS, Row
from lookup_plot import plot
from lookup_targets import missed, target
from mooncake_loopback import Loopback, connect, loopback
from vllm_peer import blob_hashes, everything

SEED = 20_260_101
DIGEST_BYTES = 32
CONTENTS = ("none", "all", "first half", "retention 0", "retention 0, fork", "31/32 on device")
LENGTHS = {"short": (131_072,), "long": (8_192, 32_768, 131_072, 1_048_576)}
PLOT_LENGTHS = tuple(1024 << i for i in range(11))
TURN = 5
MARKER = "<!-- table -->"
Exists = Callable[[list[str]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured comparison; times in milliseconds, medians of interleaved runs."""

    row: str
    store: str
    num_tokens: int
    contents: str
    peer_hit: int
    hit: int
    peer_keys: int
    keys: int
    loaded: int
    proofs: int
    spec_groups: int
    round_trips: int
    peer_ms: float
    ms: float

    @property
    def ratio(self) -> float:
        """How many times faster than the peer."""
        return self.peer_ms / self.ms


class ClientStore:
    """Just enough of a store for lookups: presence by a client's ``batch_is_exist``."""

    def __init__(self, is_exist: Exists) -> None:
        self._is_exist = is_exist

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tell which keys are present."""
        return [code == 1 for code in self._is_exist(list(keys))]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is looked up: hashes and the tokens that the device holds."""

    blob: bytes
    device_prefix: int = 0


class Bench:
    """One row at one length: both systems, their contents and prompts."""

    def __init__(self, row: Row, num_tokens: int) -> None:
        self.row, self.peer, self.layout = row, row.peer(), row.layout()
        self.num_tokens = num_tokens // self.layout.alignment * self.layout.alignment
        namespace = Namespace(model_version="benchmark")
        self.scheme = KeyScheme(namespace, self.layout, digest_bytes=DIGEST_BYTES)
        rng = random.Random(SEED)
        units = self.num_tokens // row.hash_unit
        half = units // 2 * DIGEST_BYTES
        stored, saved, fresh = (rng.randbytes(units * DIGEST_BYTES) for _ in range(3))
        self._stored, self.saved = stored, saved
        device = self.num_tokens * 31 // 32 // self.layout.alignment * self.layout.alignment
        self.prompts = {
            "none": Prompt(fresh),
            "all": Prompt(stored),
            "first half": Prompt(stored[:half] + fresh[half:]),
            "retention 0": Prompt(saved),
            "retention 0, fork": Prompt(saved[:half] + fresh[half:]),
            "31/32 on device": Prompt(stored, device),
        }

    def stored_keys(self, contents: Sequence[str]) -> list[str]:
        """Return both systems' keys for these contents: all of one prompt, what a save keeps of another."""
        keys: list[str] = []
        if {"all", "first half", "31/32 on device"} & set(contents):
            keys += self.peer.all_keys(self.num_tokens, _hashes(self._stored))
            for group in self.layout.spec_groups:
                for rank in range(group.num_ranks):
                    objects = range(self.num_tokens // group.object_size)
                    keys += self.scheme.keys(group.index, rank, objects, self._stored)
        if any(name.startswith("retention") for name in contents):
            states = range(self.peer.scheduler_block, self.num_tokens + 1, self.peer.scheduler_block)
            keys += self.peer.saved_keys(self.num_tokens, _hashes(self.saved), 0, list(states)[-2:])
            keys += save_keys(self.layout, self.scheme, 0, self.num_tokens, self.saved)
        return keys

    def compare(self, contents: str, store: str, is_exist: Exists, turns: int) -> Cell:
        """Look one prompt up on both sides, taking turns."""
        prompt = self.prompts[contents]
        hashes = blob_hashes(prompt.blob, DIGEST_BYTES)
        driver = LookupDriver(ClientStore(is_exist), self.scheme)  # type: ignore[arg-type]

        def ours() -> LookupOutcome:
            return driver.lookup(self.num_tokens, prompt.blob, device_prefix=prompt.device_prefix)

        outcome, peer_hit = ours(), self.peer.lookup(self.num_tokens, hashes, is_exist)
        peer_ms, our_ms = in_turns(lambda: self.peer.lookup(self.num_tokens, hashes, is_exist), ours, turns)
        driver.close()
        found = outcome.result
        ranks = [group.num_ranks for group in self.layout.spec_groups]
        candidates = max(0, min(found.full_run, self.num_tokens) - found.hit) // self.layout.alignment
        return Cell(
            row=self.row.title,
            store=store,
            num_tokens=self.num_tokens,
            contents=contents,
            peer_hit=peer_hit,
            hit=found.hit,
            peer_keys=self.peer.door.num_keys,
            keys=sum(found.keys_asked),
            loaded=sum(len(load) * num for load, num in zip(found.loads, ranks, strict=True)),
            proofs=candidates,
            spec_groups=len(ranks),
            round_trips=outcome.calls,
            peer_ms=peer_ms,
            ms=our_ms,
        )


def save_keys(
    layout: Layout, scheme: KeyScheme, retention: Retention, num_tokens: int, blob: bytes
) -> list[str]:
    """Return the keys that a save of a finished prompt puts."""
    plans = plan_save(layout, retention=retention, start=0, stop=num_tokens, num_tokens=num_tokens)
    return [
        key
        for group, plan in zip(layout.spec_groups, plans, strict=True)
        for rank in range(group.num_ranks)
        for key in scheme.keys(group.index, rank, plan.indices(), blob)
    ]


def compare_saves(row: Row, num_tokens: int, turns: int) -> Iterator[dict[str, object]]:
    """Yield the cost of planning a save (masks and keys) on both sides, per retention."""
    bench = Bench(row, num_tokens)
    blob, hashes = bench.saved, _hashes(bench.saved)
    for retention, peer_retention in ((0, 0), ("all", None)):

        def ours(retention: Retention = retention) -> list[str]:  # type: ignore[assignment]
            return save_keys(bench.layout, bench.scheme, retention, num_tokens, blob)

        def peers(retention: int | None = peer_retention) -> list[str]:
            return bench.peer.save_plan(num_tokens, hashes, retention, is_exist=everything)

        keys, peer_keys = len(ours()), len(peers())
        peer_ms, our_ms = in_turns(peers, ours, turns)
        yield {
            "row": row.title,
            "num_tokens": num_tokens,
            "retention": retention,
            "keys": keys,
            "peer_keys": peer_keys,
            "peer_ms": peer_ms,
            "ms": our_ms,
            "ratio": peer_ms / our_ms,
        }


def _held(held: set[str], asked: list[str]) -> list[int]:
    return [key in held for key in asked]


def _hashes(blob: bytes) -> list[bytes]:
    return [blob[i : i + DIGEST_BYTES] for i in range(0, len(blob), DIGEST_BYTES)]


def in_turns(peers: Callable[[], object], ours: Callable[[], object], turns: int) -> tuple[float, float]:
    """Return both sides' median milliseconds; they take turns of ``TURN`` calls each."""
    peer_ms: list[float] = []
    our_ms: list[float] = []
    for _ in range(turns):
        peer_ms += [_timed(peers) for _ in range(TURN)]
        our_ms += [_timed(ours) for _ in range(TURN)]
    return statistics.median(peer_ms), statistics.median(our_ms)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(
    rows: Sequence[Row], lengths: Sequence[int], contents: Sequence[str], cluster: Loopback
) -> Iterator[Cell]:
    """Yield every cell of the grid, on the set and on the master."""
    client = connect(cluster.port)
    try:
        for row in rows:
            for length in lengths:
                bench = Bench(row, length)
                keys = bench.stored_keys(contents)
                held = set(keys)
                loaded = cluster.load(keys)
                if loaded["failed"]:
                    raise RuntimeError(f"{loaded['failed']} of {len(keys)} keys could not be loaded")
                turns = 1 if length > 200_000 else 3
                for name in contents:
                    yield bench.compare(name, "set", partial(_held, held), turns)
                    yield bench.compare(name, "master", client.batch_is_exist, turns)
                cluster.clear()
    finally:
        client.close()


def _settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--long", action="store_true", help="all lengths, minutes to an hour")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--page", type=Path, help="put the table into this docs page, below its marker")
    parser.add_argument("--plot", type=Path, help="write keys and time over prompt length, 1K to 1M, as SVG")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    settings = _settings()
    lengths = LENGTHS["long" if settings.long else "short"]
    cells: list[Cell] = []
    saves = [cost for row in ROWS if row.tp == 1 for cost in compare_saves(row, 131_072, 5)]
    with loopback(4 << 30) as cluster:
        for cell in measure(ROWS, lengths, CONTENTS, cluster):
            cells.append(cell)
            print(_line(cell), flush=True)
        if settings.plot:
            rows = [row for row in ROWS if row.title in ("gpt-oss-like, TP 1", "DeepSeek-V4-like, TP 1")]
            curve = list(measure(rows, PLOT_LENGTHS, ("none", "all", "retention 0, fork"), cluster))
            plot([cell for cell in curve if cell.store == "master"], settings.plot)
    for cost in saves:
        print(f"save {cost['row']}, retention {cost['retention']}: {cost['keys']} keys, {cost['ratio']:.1f}x")
    if settings.json:
        figures = [{**asdict(cell), "ratio": cell.ratio} for cell in cells]
        settings.json.write_text(
            json.dumps({"seed": SEED, "lookups": figures, "saves": saves}, indent=1) + "\n"
        )
    if settings.page:
        of_page = [cell for cell in cells if 130_000 < cell.num_tokens < 132_000]
        _put_into_page(settings.page, [*_table(of_page), "", *_save_table(saves)])
    wrong = [problem for cell in cells for problem in missed(cell)]
    for problem in wrong:
        print(f"MISSED: {problem}")
    return 1 if wrong else 0


def _put_into_page(page: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the page's marker and its next heading."""
    before, after = page.read_text().split(MARKER)
    rest = after[after.index("\n## ") :]
    page.write_text("\n".join([before + MARKER, "", *lines, ""]) + rest)


def _save_table(saves: Sequence[dict[str, object]]) -> Iterator[str]:
    yield "Planning a save of 128K tokens, masks and keys, beside vLLM's store path without its put:"
    yield ""
    yield "| layout | retention | keys (peer's) | faster | target |"
    yield "|---|---|---|---|---|"
    for cost in saves:
        wanted = "5x" if str(cost["row"]).startswith("DeepSeek") else ""
        yield (
            f"| {cost['row']} | {cost['retention']} | {cost['keys']:,} ({cost['peer_keys']:,}) "
            f"| {cost['ratio']:.1f}x | {wanted} |"
        )


def _line(cell: Cell) -> str:
    wanted = target(cell)
    aim = f" (target {wanted:g}x)" if wanted and cell.store == "master" else ""
    return (
        f"{cell.row:42} {cell.num_tokens:>9,} {cell.contents:18} {cell.store:6} hit {cell.hit:>9,} "
        f"keys {cell.keys:>7,} of {cell.peer_keys:>9,}, {cell.round_trips:3} calls, {cell.ratio:7.1f}x{aim}"
    )


def _table(cells: Sequence[Cell]) -> Iterator[str]:
    titles = ("layout", "tokens", "contents", "hit (peer's)", "keys (peer's)", "calls", "faster, master")
    yield f"| {' | '.join((*titles, 'target', 'faster, set'))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    in_memory = {(c.row, c.num_tokens, c.contents): c for c in cells if c.store == "set"}
    for cell in (c for c in cells if c.store == "master"):
        wanted = target(cell)
        yield (
            f"| {cell.row} | {cell.num_tokens:,} | {cell.contents} | {cell.hit:,} ({cell.peer_hit:,}) "
            f"| {cell.keys:,} ({cell.peer_keys:,}) | {cell.round_trips} | {cell.ratio:.1f}x "
            f"| {f'{wanted:g}x' if wanted else ''} "
            f"| {in_memory[cell.row, cell.num_tokens, cell.contents].ratio:.1f}x |"
        )


if __name__ == "__main__":
    sys.exit(main())
