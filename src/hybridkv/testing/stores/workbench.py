"""What the examples and the machine need: a store, memory beside it, and bytes to put."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hybridkv.stores.base import GetResult, PutResult, Segments, Store

MakeStore = Callable[[int | None], Store]
"""Opens an empty store that holds at most this many payload bytes.

``None``: no limit, or one that no example reaches (1,000 objects). A store with fixed costs for each object
translates the bytes so that as many objects of the suite's size fit.
"""

FILL = 0xEE
"""The byte that fills fresh memory."""


class Workbench:
    """A store and one region of memory to put objects from and get them into.

    Attributes:
        store: the store.
        memory: the region's bytes.
        region: what the store made of ``memory``.
    """

    def __init__(self, store: Store, num_bytes: int) -> None:
        self.store = store
        self.memory = np.zeros(num_bytes, dtype=np.uint8)
        self.region = store.register(self.memory.data)
        self._next = 0

    def lay_out(self, num_bytes: int, num_segments: int = 1) -> Segments:
        """Return memory for one object: uneven segments with gaps between, the highest address first.

        The memory is reused once the region is through; its content is a filler.
        """
        num_segments = min(num_segments, num_bytes)
        sizes = [1] * (num_segments - 1) + [num_bytes - num_segments + 1]
        if self._next + num_bytes + 3 * num_segments > len(self.memory):
            self._next = 0
        segments = []
        for size in sizes:
            segments.append((self.region.address + self._next, size))
            self._next += size + 3
        segments.reverse()
        self.write(segments, bytes([FILL]) * num_bytes)
        return segments

    def write(self, segments: Segments, data: bytes) -> None:
        """Write one object's bytes to its segments."""
        for address, size in segments:
            start = address - self.region.address
            self.memory[start : start + size] = np.frombuffer(data[:size], dtype=np.uint8)
            data = data[size:]

    def read(self, segments: Segments) -> bytes:
        """Return one object's bytes from its segments."""
        starts = [(address - self.region.address, size) for address, size in segments]
        return b"".join(self.memory[start : start + size].tobytes() for start, size in starts)

    def source(self, data: bytes, num_segments: int = 1) -> Segments:
        """Return segments that hold ``data``."""
        segments = self.lay_out(len(data), num_segments)
        self.write(segments, data)
        return segments

    def put(self, key: str, data: bytes, num_segments: int = 1) -> PutResult:
        """Put one object and overwrite its source."""
        source = self.source(data, num_segments)
        (result,) = self.store.put([key], [source])
        self.write(source, bytes(len(data)))
        return result

    def get(self, key: str, num_bytes: int, num_segments: int = 1) -> tuple[GetResult, bytes]:
        """Get one object; return the result and what the target holds afterwards."""
        target = self.lay_out(num_bytes, num_segments)
        (result,) = self.store.get([key], [target])
        return result, self.read(target)

    def contains(self, key: str) -> bool:
        """Tell whether one object is stored."""
        return self.store.contains([key]) == [True]


def payload(seed: int | str, num_bytes: int) -> bytes:
    """Return bytes that differ for every seed and are equal for equal ones."""
    return random.Random(seed).randbytes(num_bytes)  # noqa: S311 - reproducible, not secret


class StoreExamples:
    """What the examples of a store need: the store under test and its sizes.

    Attributes:
        object_bytes: size of an object, >= 16.
        capacity_objects: objects that the bounded examples give room for, >= 3; ``None``, for a store whose
            capacity cannot be set, skips them.
        is_lru: whether the store evicts exactly the least recently used object.
    """

    object_bytes = 64
    capacity_objects: int | None = 4
    is_lru = True

    def make_store(self, capacity_bytes: int | None) -> Store:
        """Open an empty store; see ``MakeStore``."""
        raise NotImplementedError

    @contextmanager
    def workbench(self, *, bounded: bool = False) -> Iterator[Workbench]:
        """Open a store with memory to work in; a bounded one has room for ``capacity_objects``."""
        capacity_bytes = self._room() * self.object_bytes if bounded else None
        store = self.make_store(capacity_bytes)
        try:
            yield Workbench(store, (64 + 2 * (self.capacity_objects or 0)) * self.object_bytes)
        finally:
            store.close()

    def _room(self) -> int:
        if self.capacity_objects is None:
            pytest.skip("the capacity of this store cannot be set")
        return self.capacity_objects

    def _fill(self, bench: Workbench, num_objects: int) -> list[str]:
        """Put ``num_objects`` objects one after the other and return their keys."""
        keys = [f"fill/{idx}" for idx in range(num_objects)]
        for key in keys:
            bench.put(key, payload(key, self.object_bytes))
        return keys
