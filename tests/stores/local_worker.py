"""A process that works on a local store and may be killed: run by the tests as a script.

local_worker.py DIR scenario KILL_AT          kill itself at the n-th step of its protocols (-1: never)
local_worker.py DIR stress SEED SECONDS       puts, gets and discards; verifies all it gets
local_worker.py DIR visit                     uses every store in DIR over and over, changes nothing
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.local.store import LocalStore

SMALL, LARGE = 4096, 8192
CAPACITY_BYTES = 64 * SMALL
STRESS_SIZES = (4096, 12_000, 70_000, 262_144)
STRESS_CAPACITY_BYTES = 24 * 2**20


def size_of(key: str) -> int:
    """The size is part of the key: ``.../<bytes>``."""
    return int(key.rpartition("/")[2])


def payload_of(key: str) -> bytes:
    """Bytes that follow from the key."""
    num_bytes = size_of(key)
    seed = int.from_bytes(key.encode()[-12:], "little") % 2**61
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.tobytes()[:num_bytes]


class Client:
    """Puts and gets objects whose bytes follow from their keys."""

    def __init__(self, store: LocalStore, num_bytes: int = 8 * 2**20) -> None:
        self.store = store
        self.memory = bytearray(num_bytes)
        self.address = store.register(self.memory).address

    def _lay_out(self, keys: list[str]) -> list[list[tuple[int, int]]]:
        places, start = [], 0
        for key in keys:
            half = size_of(key) // 2
            places.append([(self.address + start, half), (self.address + start + half, size_of(key) - half)])
            start += size_of(key)
        return places

    def put(self, keys: list[str]) -> list[PutResult]:
        data = b"".join(map(payload_of, keys))
        self.memory[: len(data)] = data
        return self.store.put(keys, self._lay_out(keys))

    def get(self, keys: list[str]) -> list[GetResult]:
        """Get objects and check the bytes of those that are served."""
        results = self.store.get(keys, self._lay_out(keys))
        start = 0
        for key, result in zip(keys, results, strict=True):
            if result is GetResult.OK:
                assert self.memory[start : start + size_of(key)] == payload_of(key), key
            start += size_of(key)
        return results


def prepare(path: Path) -> list[str]:
    """Fill a store with small objects and return their keys, the oldest first."""
    keys = [f"old/{idx}/{SMALL}" for idx in range(CAPACITY_BYTES // SMALL)]
    store = LocalStore(path, CAPACITY_BYTES)
    Client(store).put(keys)
    store.close()
    return keys


def scenario(path: Path, at_point) -> None:
    """Every protocol once: open, recover, evict, move a chunk, put, discard."""
    store = LocalStore(path, CAPACITY_BYTES, at_point=at_point)
    client = Client(store)
    client.put([f"new/{idx}/{SMALL}" for idx in range(3)])
    client.put([f"new/{idx}/{LARGE}" for idx in range(2)])
    client.get([f"new/1/{SMALL}", f"new/1/{LARGE}"])
    store.discard([f"new/0/{SMALL}", f"new/0/{LARGE}"])
    client.put([f"newer/0/{SMALL}"])
    store.close()


def kill_at(step: int):
    """A hook that kills this process at its n-th call."""
    count = 0

    def at_point(_point: str) -> None:
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    return at_point


def stress(path: Path, seed: int, seconds: float) -> None:
    """Work at random; a line of counts for each round, so that what was done before a kill is known."""
    chance = random.Random(seed)
    store = LocalStore(path, STRESS_CAPACITY_BYTES)
    client = Client(store)
    deadline = time.monotonic() + seconds
    counts = {"stored": 0, "ok": 0, "corrupt": 0}
    while time.monotonic() < deadline:
        keys = [f"{chance.randrange(400)}/{chance.choice(STRESS_SIZES)}" for _ in range(12)]
        counts["stored"] += client.put(keys).count(PutResult.STORED)
        results = client.get([f"{chance.randrange(400)}/{chance.choice(STRESS_SIZES)}" for _ in range(12)])
        counts["ok"] += results.count(GetResult.OK)
        counts["corrupt"] += results.count(GetResult.CORRUPT)
        if chance.random() < 0.1:
            store.discard(keys[:2])
        stats = store.stats()
        assert stats.used_bytes <= STRESS_CAPACITY_BYTES
        sys.stdout.write(json.dumps(counts) + "\n")
        sys.stdout.flush()


def visit(parent: Path) -> None:
    """Open, ask, check and close every store in a directory, until killed."""
    while True:
        for path in parent.iterdir():
            with contextlib.suppress(ConfigError), contextlib.closing(LocalStore(path)) as store:
                client = Client(store, 1 << 16)
                for _ in range(5):
                    assert client.get(["nothing/4096"]) == [GetResult.ABSENT]
                    store.discard(["nothing/4096"])
                    assert store.check().num_errors == 0


def main() -> None:
    path, mode, *arguments = Path(sys.argv[1]), *sys.argv[2:]
    if mode == "scenario":
        scenario(path, kill_at(int(arguments[0])))
    elif mode == "visit":
        visit(path)
    else:
        with contextlib.suppress(BrokenPipeError):
            stress(path, int(arguments[0]), float(arguments[1]))


if __name__ == "__main__":
    main()
