"""Examples of a store that fills up, and of what it tells of itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybridkv.stores.base import GetResult, ListsObjects, PutResult, ReportsStats
from hybridkv.testing.stores.workbench import StoreExamples, Workbench, payload


class RoomTests(StoreExamples):
    """The capacity holds, the least recently used objects go first, and the counts are right."""

    def test_the_capacity_is_never_exceeded(self) -> None:
        """However many objects come one by one, and what was stored is there."""
        with self.workbench(bounded=True) as bench:
            keys = []
            for idx in range(3 * self._room()):
                keys.append(f"a/{idx}")
                result = bench.put(keys[-1], payload(idx, self.object_bytes))
                present = bench.store.contains(keys)
                assert present[-1] == (result is PutResult.STORED)
                assert sum(present) <= self._room()

    def test_no_object_goes_while_there_is_room(self) -> None:
        """A store fills up to its capacity."""
        with self.workbench(bounded=True) as bench:
            keys = self._fill(bench, self._room())
            assert bench.store.contains(keys) == [True] * self._room()

    def test_what_a_batch_stores_is_there_when_it_returns(self) -> None:
        """A batch of twice the capacity evicts nothing of its own; the rest is refused."""
        with self.workbench(bounded=True) as bench:
            keys = [f"a/{idx}" for idx in range(2 * self._room())]
            results = bench.store.put(keys, [bench.source(payload(key, self.object_bytes)) for key in keys])
            assert set(results) == {PutResult.STORED, PutResult.REFUSED}
            assert bench.store.contains(keys) == [result is PutResult.STORED for result in results]

    def test_an_object_larger_than_the_store_is_refused_and_evicts_nothing(self) -> None:
        """Its neighbour in the batch is stored."""
        with self.workbench(bounded=True) as bench:
            keys = self._fill(bench, self._room() - 1)
            huge = bench.lay_out((self._room() + 1) * self.object_bytes)
            good = bench.source(payload(0, self.object_bytes))
            results = bench.store.put(["huge", "good"], [huge, good])
            assert results == [PutResult.REFUSED, PutResult.STORED]
            assert bench.store.contains([*keys, "huge", "good"]) == [True] * len(keys) + [False, True]

    def test_discarding_makes_room(self) -> None:
        """A discarded object's place is used before anything is evicted."""
        with self.workbench(bounded=True) as bench:
            keys = self._fill(bench, self._room())
            bench.store.discard([keys[-1]])
            assert bench.put("new", payload("new", self.object_bytes)) is PutResult.STORED
            assert bench.store.contains(keys) == [True] * (self._room() - 1) + [False]

    def test_an_object_that_was_read_outlives_older_reads(self) -> None:
        """Least recently used first: get renews."""
        with self._full_lru_store() as (bench, keys):
            assert bench.get(keys[0], self.object_bytes)[0] is GetResult.OK
            bench.put("new", payload("new", self.object_bytes))
            assert bench.store.contains([*keys[:2], "new"]) == [True, False, True]

    def test_looking_and_failing_renew_nothing(self) -> None:
        """Neither contains nor a put of a taken key nor a get with the wrong size makes an object recent."""
        with self._full_lru_store() as (bench, keys):
            assert bench.contains(keys[0])
            assert bench.put(keys[0], payload("other", self.object_bytes)) is PutResult.ALREADY
            assert bench.get(keys[0], self.object_bytes - 1)[0] is GetResult.CORRUPT
            bench.put("new", payload("new", self.object_bytes))
            assert bench.store.contains([*keys[:2], "new"]) == [False, True, True]

    @contextmanager
    def _full_lru_store(self) -> Iterator[tuple[Workbench, list[str]]]:
        if not self.is_lru:
            pytest.skip("the store promises no exact order of eviction")
        with self.workbench(bounded=True) as bench:
            yield bench, self._fill(bench, self._room())

    def test_a_store_that_lists_shows_every_object_and_its_size(self) -> None:
        """All objects, those of a prefix, and none."""
        with self.workbench() as bench:
            store = bench.store
            if not isinstance(store, ListsObjects):
                pytest.skip("the store does not list its objects")
            assert list(store.list()) == []
            for key, size in [
                ("a/1", self.object_bytes),
                ("a/2", self.object_bytes - 1),
                ("b", self.object_bytes),
            ]:
                bench.put(key, payload(key, size))
            listed = {
                prefix: {info.key: info.num_bytes for info in store.list(prefix)}
                for prefix in ["", "a/", "c"]
            }
            under_a = {"a/1": self.object_bytes, "a/2": self.object_bytes - 1}
            assert listed == {"": {**under_a, "b": self.object_bytes}, "a/": under_a, "c": {}}

    def test_a_store_that_counts_counts_right(self) -> None:
        """Stored once, refused as taken, discarded."""
        with self.workbench() as bench:
            store = bench.store
            if not isinstance(store, ReportsStats):
                pytest.skip("the store does not count")
            for key in ["a", "b", "b"]:
                bench.put(key, payload(key, self.object_bytes))
            store.discard(["a"])
            stats = store.stats()
            assert (stats.objects, stats.used_bytes) == (1, self.object_bytes)
            assert (stats.stored_objects, stats.stored_bytes) == (2, 2 * self.object_bytes)
            assert (stats.evicted_objects, stats.evicted_bytes) == (0, 0)

    def test_a_store_that_counts_counts_evictions(self) -> None:
        """As many as did not fit."""
        with self.workbench(bounded=True) as bench:
            store = bench.store
            if not isinstance(store, ReportsStats):
                pytest.skip("the store does not count")
            keys = self._fill(bench, self._room() + 2)
            gone = store.contains(keys).count(False)
            stats = store.stats()
            assert (stats.evicted_objects, stats.evicted_bytes) == (gone, gone * self.object_bytes)
