"""The Mooncake store beside its bare client, against a storage node in another process.

    python benchmarks/mooncake_store.py [--json FILE] [--page FILE] [--seed N]

All contenders move the same objects, one batch after the other in one process; a round runs each once, and
after a few rounds each gets a new client. Figures are medians over all rounds, as shares of the bare
client of the same rounds, which moves each object's payload and trailer as one registered piece of memory,
without gathering, hashing or verifying anything.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.mooncake.client import MAX_SLICES, Client
from hybridkv.stores.mooncake.library import load_library
from hybridkv.stores.mooncake.settings import settings_of
from hybridkv.stores.mooncake.trial import TrialCluster
from hybridkv.stores.mooncake.values import TRAILER_BYTES
from hybridkv.stores.registry import open_store, parse_store_uri
from hybridkv.units import format_bytes
from store import BATCH, MARKER, Memory, keys_of, timed

SIZES = (4096, 65_536, 262_144, 2**20, 4 * 2**20)
SEGMENTS = (1, 64)
ROUNDS = 5
CLIENTS = 6
"""Sets of clients: how fast one is depends on which cores its connections come to lie on."""
SEGMENT_BYTES = 2 * 2**30
CONTENDERS = ("bare", "no checksum", "default", "never packed")
QUERIES = {"no checksum": "&checksum=off", "never packed": "&pack=1"}
WEDGE_SEGMENTS, WEDGE_BYTES = 64, 16 * 1024
"""A batch of 64 objects of 64 segments of 16 KiB hangs the bare client for ever."""


class Bare:
    """Mooncake's own client, moving one contiguous piece an object."""

    def __init__(self, uri: str) -> None:
        self.client = Client(load_library(), settings_of(parse_store_uri(uri)))
        self.pieces: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def _places(self, num_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
        size = num_bytes + TRAILER_BYTES
        if num_bytes not in self.pieces:
            self.pieces[num_bytes] = np.ones(BATCH * size, dtype=np.uint8)
            self.client.register(self.pieces[num_bytes].ctypes.data, BATCH * size)
        start = self.pieces[num_bytes].ctypes.data
        return [[start + idx * size] for idx in range(BATCH)], [[size]] * BATCH

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        if self.client.put(keys, *self._places(memory.num_bytes), keys) != [0] * len(keys):
            raise RuntimeError("not all was stored")

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        if self.client.get(keys, *self._places(memory.num_bytes)) != [0] * len(keys):
            raise RuntimeError("not all was served")

    def discard(self, keys: Sequence[str]) -> None:
        self.client.remove(keys)

    def close(self) -> None:
        self.client.close(10)


class Mooncake:
    """A store of ours on Mooncake."""

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self.known: dict[int, Memory] = {}

    def _register(self, memory: Memory) -> None:
        if id(memory) not in self.known:
            self.known[id(memory)] = memory
            self.store.register(memory.array)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        if self.store.put(keys, memory.batch) != [PutResult.STORED] * len(keys):
            raise RuntimeError("not all was stored")

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        if self.store.get(keys, memory.batch) != [GetResult.OK] * len(keys):
            raise RuntimeError("not all was served")

    def discard(self, keys: Sequence[str]) -> None:
        self.store.discard(keys)

    def close(self) -> None:
        self.store.close()


Seconds = dict[str, dict[str, list[float]]]


def measure(contenders: dict[str, Any], num_bytes: int, num_segments: int, chance: random.Random) -> Seconds:
    """Return the seconds of each contender's batches of each round: put and get."""
    source, target = Memory(num_bytes, num_segments), Memory(num_bytes, num_segments)
    seconds: Seconds = {name: {"put": [], "get": []} for name in contenders}
    for turn in range(ROUNDS + 1):
        for who, name in enumerate(chance.sample(list(contenders), len(contenders))):
            keys = [f"{key}/{num_bytes}/{num_segments}" for key in keys_of(who, turn)]
            put = timed(contenders[name].put, keys, source)
            get = timed(contenders[name].get, chance.sample(keys, BATCH), target)
            contenders[name].discard(keys)
            if turn:  # the first round warms memory
                seconds[name]["put"].append(put)
                seconds[name]["get"].append(get)
    return seconds


def cell(num_bytes: int, num_segments: int, runs: Sequence[Seconds]) -> dict[str, Any]:
    """Return GB/s of each contender, put and get, and its share of the bare client's in the same rounds."""
    rates: dict[str, dict[str, float]] = {}
    for name in CONTENDERS:
        rates[name] = {}
        for verb in ("put", "get"):
            times = [second for run in runs for second in run[name][verb]]
            bare = [second for run in runs for second in run["bare"][verb]]
            shares = [theirs / own for theirs, own in zip(bare, times, strict=True)]
            rates[name][f"{verb}_gb_per_s"] = round(BATCH * num_bytes / statistics.median(times) / 1e9, 4)
            rates[name][f"{verb}_share"] = round(statistics.median(shares), 3)
    return {"object_bytes": num_bytes, "segments": num_segments, "contenders": rates}


def touch_all(store: Mooncake) -> None:
    """Write to all memory of the storage node once: its pages come from the kernel at their first use."""
    memory = Memory(2 * 2**20, 1)
    batches = [
        [f"{key}/warm" for key in keys_of(8, turn)] for turn in range(SEGMENT_BYTES // len(memory.array))
    ]
    store.store.register(memory.array)
    for keys in batches:
        store.store.put(keys, memory.batch)
    for keys in batches:
        store.discard(keys)


def wedge(store: Mooncake) -> dict[str, Any]:
    """Move the batch that hangs the bare client; return what a call of it was cut into at most."""
    num_bytes = WEDGE_SEGMENTS * WEDGE_BYTES
    source, target = Memory(num_bytes, WEDGE_SEGMENTS), Memory(num_bytes, WEDGE_SEGMENTS)
    source.array[:] = np.random.default_rng(1).integers(0, 256, len(source.array), dtype=np.uint8)
    target.array[:] = 0
    keys = [f"{key}/wedge" for key in keys_of(9, 0)]
    store.put(keys, source)
    store.get(keys, target)
    store.discard(keys)
    return {
        "objects": BATCH,
        "segments": WEDGE_SEGMENTS,
        "segment_bytes": WEDGE_BYTES,
        "is_right": bool((source.array == target.array).all()),
        "max_slices_a_call": MAX_SLICES,
    }


def run(seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all cells, and what became of the batch that wedges."""
    chance, passed = random.Random(seed), {}
    runs: dict[tuple[int, int], list[Seconds]] = {(size, num): [] for size in SIZES for num in SEGMENTS}
    with tempfile.TemporaryDirectory() as directory:
        cluster = TrialCluster(Path(directory), segment_bytes=SEGMENT_BYTES)
        try:
            for turn in range(CLIENTS):
                contenders: dict[str, Any] = {}
                for name in chance.sample(CONTENDERS, len(CONTENDERS)):
                    make = Bare if name == "bare" else Mooncake
                    contenders[name] = make(cluster.uri + QUERIES.get(name, ""))
                if not turn:
                    touch_all(contenders["default"])
                    passed = wedge(contenders["default"])
                for (size, num), found in runs.items():
                    found.append(measure(contenders, size, num, chance))
                for contender in contenders.values():
                    contender.close()
        finally:
            cluster.close()
    return [cell(size, num, found) for (size, num), found in runs.items()], passed


def page_lines(cells: Sequence[dict[str, Any]], passed: dict[str, Any]) -> Iterator[str]:
    """Yield the docs page's table."""
    ours = [name for name in CONTENDERS if name != "bare"]
    yield "Put / get of batches of 64 objects, as shares of the bare client that moves one piece for each:"
    yield ""
    yield f"| object | segments | {' | '.join(ours)} | bare client, GB/s |"
    yield "|---|---|" + "---|" * (len(ours) + 1)
    for cell in cells:
        rates = cell["contenders"]
        shares = " | ".join(
            f"{rates[name]['put_share']:.0%} / {rates[name]['get_share']:.0%}" for name in ours
        )
        bare = rates["bare"]
        yield (
            f"| {format_bytes(cell['object_bytes'])} | {cell['segments']} | {shares} "
            f"| {bare['put_gb_per_s']:.2f} / {bare['get_gb_per_s']:.2f} |"
        )
    yield ""
    yield (
        f"A batch of {passed['objects']} objects of {passed['segments']} segments of "
        f"{format_bytes(passed['segment_bytes'])}, which hangs the bare client for ever, "
        f"{'came back right' if passed['is_right'] else 'CAME BACK WRONG'}."
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help=f"put the table below {MARKER} into this docs page")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    cells, passed = run(settings.seed)
    lines = list(page_lines(cells, passed))
    print("\n".join(lines))
    if settings.json:
        data = {
            "batch": BATCH,
            "rounds": CLIENTS * ROUNDS,
            "seed": settings.seed,
            "wedge": passed,
            "cells": cells,
        }
        settings.json.write_text(json.dumps(data, indent=1) + "\n")
    if settings.page:
        before, after = settings.page.read_text().split(MARKER)
        rest = after[after.find("\n## ") :] if "\n## " in after else ""
        settings.page.write_text("\n".join([before + MARKER, "", *lines, ""]) + rest)
    return 0 if passed["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
