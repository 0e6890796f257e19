from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, StoreError
from hybridkv.stores.base import GetResult, ListsObjects, PutHint, PutResult, ReportsStats, Store
from hybridkv.stores.eviction import LruEviction
from hybridkv.stores.memory import MemoryStore
from hybridkv.testing.stores import StoreTests, run_store_machine

STORED, ALREADY, REFUSED = PutResult.STORED, PutResult.ALREADY, PutResult.REFUSED


class TestMemoryStore(StoreTests):
    def make_store(self, capacity_bytes):
        return MemoryStore(capacity_bytes)


def test_an_unbounded_store_equals_a_dict():
    run_store_machine(MemoryStore)


def test_a_bounded_store_gives_up_only_what_the_capacity_forces():
    run_store_machine(MemoryStore, capacity_bytes=100)


def test_a_memory_store_has_every_capability():
    store = MemoryStore()
    assert isinstance(store, Store)
    assert isinstance(store, ListsObjects)
    assert isinstance(store, ReportsStats)


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_a_capacity_below_one_byte_is_a_config_error(capacity_bytes):
    with pytest.raises(ConfigError, match="capacity_bytes"):
        MemoryStore(capacity_bytes)


# --- metadata only: no memory is registered, sizes are all there is ---------------------------------------


def sized(*sizes: int) -> list[list[tuple[int, int]]]:
    return [[(0, size)] for size in sizes]


def test_without_payloads_sizes_are_kept_and_no_memory_is_touched():
    store = MemoryStore(keep_payloads=False)
    assert store.put(["a", "b"], [[(0, 3), (8, 4)], [(0, 5)]]) == [STORED, STORED]
    assert {info.key: info.num_bytes for info in store.list()} == {"a": 7, "b": 5}
    assert store.get(["a", "b", "c"], sized(7, 7, 7)) == [GetResult.OK, GetResult.CORRUPT, GetResult.ABSENT]
    store.discard(["a"])
    assert store.stats().used_bytes == 5


def test_without_payloads_objects_without_bytes_are_refused_too():
    store = MemoryStore(keep_payloads=False)
    for empty in [[], [(0, 0)], [(0, -1), (0, 2)]]:
        with pytest.raises(StoreError):
            store.put(["a"], [empty])


def test_each_put_that_evicts_reports_once_what_it_evicted():
    reports = []
    store = MemoryStore(10, keep_payloads=False, on_evict=reports.append)
    store.put(["a", "b", "c"], sized(3, 3, 4))
    assert reports == []
    store.put(["d", "e"], sized(4, 2))
    assert reports == [[("a", 3), ("b", 3)]]
    store.discard(["c"])
    assert reports == [[("a", 3), ("b", 3)]]


def test_the_listener_may_use_the_store():
    seen = []
    store = MemoryStore(
        4, keep_payloads=False, on_evict=lambda gone: seen.append(store.contains([gone[0][0], "b"]))
    )
    store.put(["a"], sized(4))
    store.put(["b"], sized(4))
    assert seen == [[False, True]]


def test_an_object_is_refused_without_evicting_when_its_batch_is_in_the_way():
    store = MemoryStore(10, keep_payloads=False)
    store.put(["old"], sized(3))
    assert store.put(["a", "b"], sized(6, 5)) == [STORED, REFUSED]
    assert store.contains(["old", "a", "b"]) == [True, True, False]


def test_what_a_batch_finds_already_stored_is_not_evicted_by_it():
    store = MemoryStore(10, keep_payloads=False)
    store.put(["a", "b"], sized(5, 5))
    assert store.put(["new", "a"], sized(5, 5)) == [STORED, ALREADY]
    assert store.contains(["a", "b", "new"]) == [True, False, True]


def test_a_policy_that_protects_everything_makes_the_store_refuse():
    class Protective(LruEviction):
        def victims(self):
            return iter(())

    store = MemoryStore(4, keep_payloads=False, eviction=Protective())
    assert store.put(["a", "b"], sized(4, 4)) == [STORED, REFUSED]


def test_a_policy_gets_the_hints_of_what_was_stored():
    class Recording(LruEviction):
        def stored(self, keys: Sequence[str], hints: Sequence[PutHint] | None) -> None:
            seen.append((list(keys), hints))
            super().stored(keys, hints)

    seen = []
    store = MemoryStore(4, keep_payloads=False, eviction=Recording())
    hints = [PutHint(parent=None, prefix=idx, spec_group=0, kept_boundary=True) for idx in range(3)]
    store.put(["huge", "a", "a"], sized(9, 4, 4), hints)
    store.put(["b"], sized(4))
    assert seen == [(["a"], [hints[1]]), (["b"], None)]


class NaiveLru:
    """The oracle: a list, oldest first, and one rule at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: list[tuple[str, int]] = []

    def put(self, keys: list[str], sizes: list[int]) -> list[PutResult]:
        present = {key for key, _ in self.objects}
        results = []
        stored: set[str] = set()
        for key, size in zip(keys, sizes, strict=True):
            if key in present & set(keys) or key in stored:
                results.append(ALREADY)
                continue
            fixed = sum(held for name, held in self.objects if name in stored or name in keys)
            if fixed + size > self.capacity_bytes:
                results.append(REFUSED)
                continue
            while sum(held for _, held in self.objects) + size > self.capacity_bytes:
                self.objects.remove(next(item for item in self.objects if item[0] not in keys))
            self.objects.append((key, size))
            stored.add(key)
            results.append(STORED)
        return results

    def get(self, key: str) -> None:
        for item in [item for item in self.objects if item[0] == key]:
            self.objects.remove(item)
            self.objects.append(item)


OBJECTS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 5)), max_size=5)


@given(steps=st.lists(OBJECTS | st.sampled_from("abcdefgh"), max_size=20))
def test_a_bounded_store_evicts_exactly_what_a_naive_lru_list_evicts(steps):
    store, naive = MemoryStore(12, keep_payloads=False), NaiveLru(12)
    for step in steps:
        if isinstance(step, str):
            sizes = {info.key: info.num_bytes for info in store.list()}
            store.get([step], sized(sizes.get(step, 1)))
            naive.get(step)
        else:
            keys, sizes = [key for key, _ in step], [size for _, size in step]
            assert store.put(keys, sized(*sizes)) == naive.put(keys, sizes)
        assert {(info.key, info.num_bytes) for info in store.list()} == set(naive.objects)


def test_a_get_is_right_although_its_object_is_evicted_before_the_copy():
    class EvictsOnUse(LruEviction):
        def used(self, keys):
            super().used(keys)
            store._remove(list(keys))

    store = MemoryStore(eviction=EvictsOnUse())
    memory = np.arange(8, dtype=np.uint8)
    address = store.register(memory).address
    store.put(["a"], [[(address, 4)]])
    assert store.get(["a"], [[(address + 4, 4)]]) == [GetResult.OK]
    assert memory.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert store.contains(["a"]) == [False]
