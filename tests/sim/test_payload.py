"""Replayed bytes: every way of mixing them up shows."""

import numpy as np
import pytest

from hybridkv.errors import CorruptPayloadError
from hybridkv.sim import payload
from hybridkv.sim.payload import PatternBytes
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.memory import MemoryStore

SIZE = 3 * 4096 + 5


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def bytes_of(store):
    moved = PatternBytes(store, SIZE)
    assert moved.put(["one", "two"], SIZE) == [PutResult.STORED] * 2
    return moved


def tampered(store, key, change):
    """Replace an object by what ``change`` makes of its bytes."""
    room = np.zeros(SIZE, dtype=np.uint8)
    region = store.register(room)
    segments = [[(region.address, SIZE)]]
    assert store.get([key], segments) == [GetResult.OK]
    store.discard([key])
    room[:] = change(room.copy())
    store.put([key], segments)
    store.unregister(region)


def test_what_was_put_is_loaded(bytes_of):
    assert bytes_of.get(["two", "one", "three"], SIZE) == [GetResult.OK, GetResult.OK, GetResult.ABSENT]


def test_more_objects_than_the_staging_buffer_holds_go_in_turns(store, monkeypatch):
    monkeypatch.setattr(payload, "STAGING_BYTES", 100)
    moved = PatternBytes(store, 40)
    keys = [str(i) for i in range(7)]
    assert moved.put(keys, 40) == [PutResult.STORED] * 7
    assert moved.get(keys, 40) == [GetResult.OK] * 7


def test_another_size_is_no_hit(bytes_of):
    assert bytes_of.get(["one"], SIZE - 1) == [GetResult.CORRUPT]


def swapped_pages(room):
    room[:4096], room[4096:8192] = room[4096:8192].copy(), room[:4096].copy()
    return room


def one_flipped_bit(room):
    room[-1] ^= 1
    return room


@pytest.mark.parametrize(
    "change",
    [
        swapped_pages,
        one_flipped_bit,
        lambda room: np.roll(room, 1),
        lambda room: np.roll(room, 8),
        np.zeros_like,
    ],
    ids=["swapped pages", "flipped bit", "shifted byte", "shifted word", "zeros"],
)
def test_wrong_bytes_end_the_run(store, bytes_of, change):
    tampered(store, "one", change)
    with pytest.raises(CorruptPayloadError, match="object one"):
        bytes_of.get(["two", "one"], SIZE)


def test_the_bytes_of_another_key_end_the_run(store, bytes_of):
    other = bytes_of._pattern("two", (SIZE + 7) // 8).view(np.uint8)[:SIZE]
    tampered(store, "one", lambda _room: other)
    with pytest.raises(CorruptPayloadError, match="object one"):
        bytes_of.get(["one"], SIZE)


def test_a_target_left_alone_is_not_taken_for_loaded(bytes_of, monkeypatch):
    bytes_of.get(["one"], SIZE)
    monkeypatch.setattr(MemoryStore, "get", lambda _self, keys, _targets: [GetResult.OK] * len(keys))
    with pytest.raises(CorruptPayloadError):
        bytes_of.get(["one"], SIZE)
