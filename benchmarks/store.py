"""Bandwidth of the local store beside plain copies and other ways to keep payloads.

    python benchmarks/store.py [--json FILE] [--page FILE] [--directory DIR] [--seed N]

Every contender is full and warm before it is timed: each put makes room first. A round runs every contender
once, one after the other; figures are medians over rounds, as shares of the copy loop of the same rounds:
one call into C an object, with the same segments. All but the copy loop hash and verify payloads. LMDB,
diskcache and Mooncake take part where they are installed.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from hybridkv.stores.base import GetResult, PutResult, Segments
from hybridkv.stores.local.store import LocalStore
from hybridkv.units import format_bytes

BATCH = 64
SIZES = (4096, 65_536, 262_144, 2**20, 4 * 2**20)
SEGMENTS = (1, 8, 64)
ROUNDS = 9
CONTAINS_KEYS = 1000
MARKER = "<!-- bandwidth -->"

Bytes = NDArray[np.uint8]


class Memory:
    """A batch of objects; segment j of all objects lies together, as an engine's layers do."""

    def __init__(self, num_bytes: int, num_segments: int) -> None:
        self.num_bytes = num_bytes
        self.array = np.ones(BATCH * num_bytes, dtype=np.uint8)
        self.address: int = self.array.ctypes.data
        step = num_bytes // num_segments
        self.batch: list[Segments] = [
            [(self.address + (segment * BATCH + idx) * step, step) for segment in range(num_segments)]
            for idx in range(BATCH)
        ]
        self.rows = self.array.reshape(num_segments, BATCH, step)
        self.views = [
            [self.array.data[address - self.address :][:size] for address, size in segments]
            for segments in self.batch
        ]

    def gather(self, idx: int) -> bytes | memoryview:
        """Return an object's bytes in one piece."""
        views = self.views[idx]
        return views[0] if len(views) == 1 else b"".join(views)

    def scatter(self, idx: int, data: bytes | memoryview) -> None:
        """Write an object's bytes to its segments."""
        start = 0
        for view in self.views[idx]:
            view[:] = data[start : start + len(view)]
            start += len(view)


class Contender(Protocol):
    """A way to keep payloads; ``put`` makes room itself."""

    def put(self, keys: Sequence[str], memory: Memory) -> None: ...

    def get(self, keys: Sequence[str], memory: Memory) -> None: ...

    def close(self) -> None: ...


class CopyLoop:
    """Plain copies into and out of a ring of warm memory of the same capacity."""

    def __init__(self, _directory: Path, capacity_bytes: int, num_bytes: int) -> None:
        self.ring = np.ones(capacity_bytes, dtype=np.uint8)
        self.num_bytes, self.num_places = num_bytes, capacity_bytes // num_bytes
        self.places: dict[str, int] = {}

    def _place(self, key: str, segments: int) -> Bytes:
        start = self.places[key]
        return self.ring[start : start + self.num_bytes].reshape(segments, -1)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        for idx, key in enumerate(keys):
            self.places[key] = len(self.places) % self.num_places * self.num_bytes
            np.copyto(self._place(key, len(memory.rows)), memory.rows[:, idx])

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        for idx, key in enumerate(keys):
            np.copyto(memory.rows[:, idx], self._place(key, len(memory.rows)))

    def close(self) -> None:
        del self.ring


class Local:
    """The local store, checksums and all."""

    def __init__(self, directory: Path, capacity_bytes: int, _num_bytes: int) -> None:
        self.store = LocalStore(directory / "local", capacity_bytes)
        self.memories: dict[int, Memory] = {}

    def _register(self, memory: Memory) -> None:
        if id(memory) not in self.memories:
            self.memories[id(memory)] = memory
            self.store.register(memory.array)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        if self.store.put(keys, memory.batch) != [PutResult.STORED] * len(keys):
            raise RuntimeError("not all was stored")

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        if self.store.get(keys, memory.batch) != [GetResult.OK] * len(keys):
            raise RuntimeError("not all was served")

    def close(self) -> None:
        self.store.close()


class Caretaker:
    """Does what a contender does not: deletes the oldest batch, hashes and verifies payloads.

    The digests are kept in a dictionary of this process, which is less than a store of many would need.
    """

    def __init__(self, capacity_bytes: int, num_bytes: int) -> None:
        self.batches: list[Sequence[str]] = []
        self.most = capacity_bytes // (BATCH * num_bytes)
        self.digests: dict[str, int] = {}

    def room_for(self, keys: Sequence[str]) -> Sequence[str]:
        """Note a batch and return the keys to delete first."""
        self.batches.append(keys)
        old = self.batches.pop(0) if len(self.batches) > self.most else ()
        for key in old:
            del self.digests[key]
        return old

    def hash(self, key: str, *pieces: bytes | memoryview) -> None:
        """Keep the digest of a payload."""
        self.digests[key] = _digest(pieces)

    def verify(self, key: str, *pieces: bytes | memoryview) -> None:
        """Compare a payload with its digest."""
        if _digest(pieces) != self.digests[key]:
            raise RuntimeError("a payload changed")


def _digest(pieces: Sequence[bytes | memoryview]) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


class Lmdb(Caretaker):
    """Payloads in LMDB on tmpfs: one transaction a batch, a writable map, no sync."""

    def __init__(self, directory: Path, capacity_bytes: int, num_bytes: int) -> None:
        import lmdb

        super().__init__(capacity_bytes, num_bytes)
        size = 2 * capacity_bytes + 64 * 2**20
        self.environment = lmdb.open(str(directory / "lmdb"), map_size=size, writemap=True, sync=False)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        old = self.room_for(keys)
        with self.environment.begin(write=True) as transaction:
            for key in old:
                transaction.delete(key.encode())
            for idx, key in enumerate(keys):
                data = memory.gather(idx)
                self.hash(key, data)
                transaction.put(key.encode(), data)

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        with self.environment.begin(buffers=True) as transaction:
            for idx, key in enumerate(keys):
                data = transaction.get(key.encode())
                self.verify(key, data)
                memory.scatter(idx, data)

    def close(self) -> None:
        self.environment.close()


class Files(Caretaker):
    """One file an object on tmpfs, written under another name and renamed."""

    def __init__(self, directory: Path, capacity_bytes: int, num_bytes: int) -> None:
        super().__init__(capacity_bytes, num_bytes)
        self.directory = directory / "files"
        self.directory.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.directory / key.replace("/", "_")

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        for key in self.room_for(keys):
            self._path(key).unlink()
        for idx, key in enumerate(keys):
            path = self._path(key)
            self.hash(key, *memory.views[idx])
            new = path.with_suffix(".new")
            fd = os.open(new, os.O_WRONLY | os.O_CREAT, 0o600)
            os.writev(fd, memory.views[idx])
            os.close(fd)
            new.rename(path)

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        for idx, key in enumerate(keys):
            fd = os.open(self._path(key), os.O_RDONLY)
            os.readv(fd, memory.views[idx])
            os.close(fd)
            self.verify(key, *memory.views[idx])

    def close(self) -> None:
        shutil.rmtree(self.directory)


class DiskCache(Caretaker):
    """diskcache on tmpfs with its defaults: SQLite and files, one transaction an object."""

    def __init__(self, directory: Path, capacity_bytes: int, num_bytes: int) -> None:
        import diskcache

        super().__init__(capacity_bytes, num_bytes)
        self.cache = diskcache.Cache(str(directory / "diskcache"), size_limit=4 * capacity_bytes)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        for key in self.room_for(keys):
            self.cache.delete(key)
        for idx, key in enumerate(keys):
            data = bytes(memory.gather(idx))
            self.hash(key, data)
            self.cache.set(key, data)

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        for idx, key in enumerate(keys):
            data = self.cache.get(key)
            self.verify(key, data)
            memory.scatter(idx, data)

    def close(self) -> None:
        self.cache.close()


class Mooncake(Caretaker):
    """The store on Mooncake, checksums and all; its storage node is another process, reached over TCP."""

    def __init__(self, directory: Path, capacity_bytes: int, num_bytes: int) -> None:
        from hybridkv.stores.mooncake.trial import TrialCluster
        from hybridkv.stores.registry import open_store

        super().__init__(capacity_bytes, num_bytes)
        logs = directory / "mooncake"
        logs.mkdir()
        self.cluster = TrialCluster(logs, segment_bytes=2 * capacity_bytes)
        self.store = open_store(self.cluster.uri)
        self.known: dict[int, Memory] = {}

    def _register(self, memory: Memory) -> None:
        if id(memory) not in self.known:
            self.known[id(memory)] = memory
            self.store.register(memory.array)

    def put(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        for key in keys:
            self.digests[key] = 0  # the store keeps its own
        old = self.room_for(keys)
        if old:
            self.store.discard(old)
        if self.store.put(keys, memory.batch) != [PutResult.STORED] * len(keys):
            raise RuntimeError("not all was stored")

    def get(self, keys: Sequence[str], memory: Memory) -> None:
        self._register(memory)
        if self.store.get(keys, memory.batch) != [GetResult.OK] * len(keys):
            raise RuntimeError("not all was served")

    def close(self) -> None:
        self.store.close()
        self.cluster.close()


CONTENDERS: dict[str, Callable[[Path, int, int], Contender]] = {
    "copy": CopyLoop,
    "local": Local,
    "LMDB": Lmdb,
    "files": Files,
    "diskcache": DiskCache,
    "Mooncake": Mooncake,
}
NEEDS = {"LMDB": "lmdb", "diskcache": "diskcache", "Mooncake": "mooncake"}


def keys_of(who: int, batch: int) -> list[str]:
    """Return keys as hybridkv makes them."""
    return [f"hkv1/{who:032x}/0/0/{batch:032x}{idx:032x}" for idx in range(BATCH)]


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured at once."""

    names: tuple[str, ...]
    num_bytes: int
    num_segments: int
    num_processes: int
    seed: int


def measure(case: Case, directory: Path, who: int, barrier: Barrier) -> dict[str, dict[str, float]]:
    """Return the median seconds of a batch by contender: put and get."""
    num_bytes = case.num_bytes
    capacity_bytes = max(64 * 2**20, 2 * BATCH * num_bytes) * case.num_processes
    chance = random.Random(case.seed + who)
    source, target = Memory(num_bytes, case.num_segments), Memory(num_bytes, case.num_segments)
    contenders = {name: CONTENDERS[name](directory, capacity_bytes, num_bytes) for name in case.names}
    num_warm = capacity_bytes // (BATCH * num_bytes) + 2
    seconds: dict[str, dict[str, list[float]]] = {name: {"put": [], "get": []} for name in case.names}
    for batch in range(num_warm + ROUNDS):
        keys = keys_of(who, batch)
        for name, contender in contenders.items():
            barrier.wait()
            put = timed(contender.put, keys, source)
            barrier.wait()
            get = timed(contender.get, chance.sample(keys, BATCH), target)
            if batch >= num_warm:
                seconds[name]["put"].append(put)
                seconds[name]["get"].append(get)
    barrier.wait()
    for contender in contenders.values():
        contender.close()
    return {
        name: {verb: statistics.median(times) for verb, times in verbs.items()}
        for name, verbs in seconds.items()
    }


def _send_measured(pipe: Connection, case: Case, directory: Path, who: int, barrier: Barrier) -> None:
    pipe.send(measure(case, directory, who, barrier))


def cell(root: Path, case: Case) -> dict[str, object]:
    """Measure one case, each of its processes spawned."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(case.num_processes)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        pipes, processes = [], []
        for who in range(case.num_processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, case, Path(directory), who, barrier)
            processes.append(context.Process(target=_send_measured, args=arguments))
            processes[-1].start()
            pipes.append(ours)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    rates: dict[str, dict[str, float]] = {}
    for name in case.names:
        rates[name] = {}
        for verb in ("put", "get"):
            # Processes start each batch together; their bandwidths add up.
            rate = sum(BATCH * case.num_bytes / result[name][verb] for result in results)
            rates[name][f"{verb}_gb_per_s"] = round(rate / 1e9, 3)
            share = rates[name][f"{verb}_gb_per_s"] / rates["copy"][f"{verb}_gb_per_s"]
            rates[name][f"{verb}_share"] = round(share, 3)
    return {
        "object_bytes": case.num_bytes,
        "segments": case.num_segments,
        "processes": case.num_processes,
        "contenders": rates,
    }


def contains_us(root: Path) -> dict[str, float]:
    """Return the median microseconds a key of ``contains`` in large batches."""
    with tempfile.TemporaryDirectory(dir=root) as directory:
        local = Local(Path(directory), 64 * 2**20, 4096)
        memory = Memory(4096, 1)
        for batch in range(16):
            local.put(keys_of(0, batch), memory)
        present = [key for batch in range(16) for key in keys_of(0, batch)][:CONTAINS_KEYS]
        absent = [key for batch in range(16) for key in keys_of(1, batch)][:CONTAINS_KEYS]
        mixed = present[: CONTAINS_KEYS // 2] + absent[: CONTAINS_KEYS // 2]
        us = {
            name: round(
                statistics.median(timed(local.store.contains, keys) for _ in range(51)) / CONTAINS_KEYS * 1e6,
                3,
            )
            for name, keys in (("present", present), ("absent", absent), ("mixed", mixed))
        }
        local.close()
    return us


def measured(root: Path, seed: int) -> Iterator[dict[str, object]]:
    """Yield all cells; what is not the local store takes part with one process."""
    installed = tuple(name for name in CONTENDERS if name not in NEEDS or find_spec(NEEDS[name]))
    for num_bytes in SIZES:
        for num_segments in SEGMENTS:
            for names, num_processes in ((installed, 1), (("copy", "local"), 2)):
                yield cell(
                    root,
                    Case(
                        names=names,
                        num_bytes=num_bytes,
                        num_segments=num_segments,
                        num_processes=num_processes,
                        seed=seed,
                    ),
                )


def page_lines(cells: Sequence[dict[str, Any]], contains: dict[str, float]) -> Iterator[str]:
    """Yield the docs page's tables."""
    others = [name for name in CONTENDERS if name in cells[0]["contenders"] and name != "copy"]
    yield "Put / get of batches of 64 by one process, as shares of the copy loop:"
    yield ""
    yield f"| object | segments | {' | '.join(others)} | local, 2 processes | copy loop, GB/s |"
    yield "|---|---|" + "---|" * (len(others) + 2)
    for one, two in zip(cells[::2], cells[1::2], strict=True):
        rows = one["contenders"]
        shares = " | ".join(_share(rows[name]) for name in others)
        copy = rows["copy"]
        yield (
            f"| {format_bytes(one['object_bytes'])} | {one['segments']} | {shares} "
            f"| {_share(two['contenders']['local'])} "
            f"| {copy['put_gb_per_s']:.1f} / {copy['get_gb_per_s']:.1f} |"
        )
    yield ""
    yield (
        f"`contains` in batches of {CONTAINS_KEYS:,}: {contains['present']:.2f} us a present key, "
        f"{contains['absent']:.2f} us an absent one."
    )


def _share(rates: dict[str, float]) -> str:
    return f"{rates['put_share']:.0%} / {rates['get_share']:.0%}"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help=f"put the tables below {MARKER} into this docs page")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the stores lie")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    cells = list(measured(settings.directory, settings.seed))
    contains = contains_us(settings.directory)
    lines = list(page_lines(cells, contains))
    print("\n".join(lines))
    if settings.json:
        data = {
            "batch": BATCH,
            "rounds": ROUNDS,
            "seed": settings.seed,
            "contains_us": contains,
            "cells": cells,
        }
        settings.json.write_text(json.dumps(data, indent=1) + "\n")
    if settings.page:
        before, after = settings.page.read_text().split(MARKER)
        rest = after[after.find("\n## ") :] if "\n## " in after else ""
        settings.page.write_text("\n".join([before + MARKER, "", *lines, ""]) + rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
