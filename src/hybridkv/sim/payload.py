"""What a replay puts under keys: real bytes that can be checked, or sizes only.

The content of an object is a cheap pattern of its key and of the position inside the object, so that
swapped pages, shifted bytes and wrong blocks all show.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, CorruptPayloadError
from hybridkv.stores.base import GetResult, PutResult, Segments, Store
from hybridkv.units import format_bytes

STAGING_BYTES = 64 << 20
MAX_OBJECT_BYTES = 512 << 20
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Payloads(Protocol):
    """Moves the objects of one spec group between a replay and its store."""

    def put(self, keys: Sequence[str], object_bytes: int) -> list[PutResult]:
        """Store one object a key."""

    def get(self, keys: Sequence[str], object_bytes: int) -> list[GetResult]:
        """Load one object a key.

        Raises:
            CorruptPayloadError: a loaded object is not what was put under its key.
        """


class SizesOnly:
    """Payloads of a replay without bytes: the store counts sizes and reads no memory."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, keys: Sequence[str], object_bytes: int) -> list[PutResult]:
        """Store one size a key."""
        results: list[PutResult] = []
        for batch in _batches(keys, object_bytes):
            results += self._store.put(batch, [((0, object_bytes),)] * len(batch))
        return results

    def get(self, keys: Sequence[str], object_bytes: int) -> list[GetResult]:
        """Ask for one size a key."""
        return self._store.get(keys, [((0, object_bytes),)] * len(keys))


class PatternBytes:
    """Payloads of a replay with bytes, moved through one registered staging buffer.

    Args:
        store: where they go.
        largest_object_bytes: the staging buffer holds at least one such object.

    Raises:
        ConfigError: the largest object is above ``MAX_OBJECT_BYTES``.
    """

    def __init__(self, store: Store, largest_object_bytes: int) -> None:
        if largest_object_bytes > MAX_OBJECT_BYTES:
            raise ConfigError(
                f"objects of {format_bytes(largest_object_bytes)} are too large to move here; lower the "
                "payload scale or the object tokens"
            )
        self._store = store
        self._staging = np.zeros(max(STAGING_BYTES, _padded(largest_object_bytes)), dtype=np.uint8)
        self._region = store.register(self._staging.data)
        words = np.arange(_padded(largest_object_bytes) // 8, dtype=np.uint64)
        self._positions = words * _STEP

    def put(self, keys: Sequence[str], object_bytes: int) -> list[PutResult]:
        """Write each key's pattern and store it."""
        results: list[PutResult] = []
        for batch in _batches(keys, object_bytes):
            rooms, segments = self._rooms(len(batch), object_bytes)
            for key, room in zip(batch, rooms, strict=True):
                self._write(key, room)
            results += self._store.put(batch, segments)
        return results

    def get(self, keys: Sequence[str], object_bytes: int) -> list[GetResult]:
        """Load each object and compare it with its key's pattern."""
        results: list[GetResult] = []
        for batch in _batches(keys, object_bytes):
            rooms, segments = self._rooms(len(batch), object_bytes)
            self._staging[: len(batch) * _padded(object_bytes)] = 0
            served = self._store.get(batch, segments)
            for key, room, result in zip(batch, rooms, served, strict=True):
                if result is GetResult.OK and not self._holds(key, room[:object_bytes]):
                    raise CorruptPayloadError(f"object {key} was loaded with other bytes than were saved")
            results += served
        return results

    def _rooms(self, count: int, object_bytes: int) -> tuple[list[NDArray[np.uint8]], list[Segments]]:
        """Return the places of a batch in the staging buffer, and their segments."""
        stride = _padded(object_bytes)
        offsets = range(0, count * stride, stride)
        rooms = [self._staging[offset : offset + stride] for offset in offsets]
        return rooms, [[(self._region.address + offset, object_bytes)] for offset in offsets]

    def _pattern(self, key: str, num_words: int) -> NDArray[np.uint64]:
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        return self._positions[:num_words] ^ np.uint64(seed)

    def _write(self, key: str, room: NDArray[np.uint8]) -> None:
        room.view(np.uint64)[:] = self._pattern(key, len(room) // 8)

    def _holds(self, key: str, content: NDArray[np.uint8]) -> bool:
        pattern = self._pattern(key, _padded(len(content)) // 8).view(np.uint8)
        return np.array_equal(content, pattern[: len(content)])


def _batches(keys: Sequence[str], object_bytes: int) -> Iterator[Sequence[str]]:
    """Yield the keys in batches that the staging buffer holds, the same with and without bytes."""
    room = max(1, STAGING_BYTES // _padded(object_bytes))
    for start in range(0, len(keys), room):
        yield keys[start : start + room]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
