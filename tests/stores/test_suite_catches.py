"""A suite that cannot fail proves nothing: each of these stores breaks one promise and must be caught."""

import time

import pytest
from hypothesis import Phase, settings

from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.eviction import LruEviction
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.regions import RegionTable
from hybridkv.testing.stores import StoreTests, run_store_machine


class KeepsViewsOfSources(MemoryStore):
    def put(self, keys, sources, hints=None):
        results = super().put(keys, sources, hints)
        self._keep_views(keys, sources, [result is PutResult.STORED for result in results])
        return results

    def _keep_views(self, keys, batch, is_moved):
        for key, pieces, moved in zip(keys, self._regions.resolve(batch), is_moved, strict=True):
            if moved and len(pieces.views) == 1:
                self._payloads[key] = pieces.views[0]


class KeepsViewsOfTargets(KeepsViewsOfSources):
    def put(self, keys, sources, hints=None):
        return MemoryStore.put(self, keys, sources, hints)

    def get(self, keys, targets):
        results = super().get(keys, targets)
        self._keep_views(keys, targets, [result is GetResult.OK for result in results])
        return results


class OverwritesOnPut(MemoryStore):
    def put(self, keys, sources, hints=None):
        self.discard(keys)
        return super().put(keys, sources, hints)


class StoresTheLastTwin(MemoryStore):
    def put(self, keys, sources, hints=None):
        last = (
            [sources[len(keys) - 1 - keys[::-1].index(key)] for key in keys]
            if len(keys) == len(sources)
            else []
        )
        return super().put(keys, last or sources, hints)


class RenewsOnContains(MemoryStore):
    def contains(self, keys):
        found = super().contains(keys)
        self._eviction.used([key for key, is_present in zip(keys, found, strict=True) if is_present])
        return found


class NeverRenews(MemoryStore):
    class _Fifo(LruEviction):
        def used(self, keys):
            pass

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes, eviction=self._Fifo())


class IgnoresCapacity(MemoryStore):
    def __init__(self, _capacity_bytes):
        super().__init__(None)


class WastesCapacity(MemoryStore):
    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes and capacity_bytes // 2)


class EvictsInVain(MemoryStore):
    def put(self, keys, sources, hints=None):
        results = super().put(keys, sources, hints)
        if PutResult.REFUSED in results:
            self._evict([key for key in list(self._sizes) if key not in keys])
        return results


class PutsKeyByKey(MemoryStore):
    def put(self, keys, sources, hints=None):
        if len(keys) < 2 or len(keys) != len(sources):
            return super().put(keys, sources, hints)
        return [
            super(PutsKeyByKey, self).put([key], [source])[0]
            for key, source in zip(keys, sources, strict=True)
        ]


class _LateStops(RegionTable):
    def _replace(self, views):
        super()._replace(views)
        self._registered = self._registered._replace(stops=[stop + 1 for stop in self._registered.stops])


class AcceptsOneByteTooMany(MemoryStore):
    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self._regions = _LateStops()


class _Forgetful(RegionTable):
    def unregister(self, region):
        pass


class NeverUnregisters(MemoryStore):
    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self._regions = _Forgetful()


class WritesWhatFits(MemoryStore):
    def get(self, keys, targets):
        results = super().get(keys, targets)
        for idx, result in enumerate(results):
            if result is GetResult.CORRUPT:
                for view in self._regions.resolve([targets[idx]])[0].views:
                    view[:] = bytes(len(view))
        return results


class CallsAnotherSizeAbsent(MemoryStore):
    def get(self, keys, targets):
        corrupt, absent = GetResult.CORRUPT, GetResult.ABSENT
        return [absent if result is corrupt else result for result in super().get(keys, targets)]


class ReversesSegments(MemoryStore):
    def get(self, keys, targets):
        return super().get(keys, [list(target)[::-1] for target in targets])


class FoldsCase(MemoryStore):
    def put(self, keys, sources, hints=None):
        return super().put([key.lower() for key in keys], sources, hints)

    def get(self, keys, targets):
        return super().get([key.lower() for key in keys], targets)


class RefusesToDiscardTheAbsent(MemoryStore):
    def discard(self, keys):
        for key in keys:
            self._remove([key])


class WorksAfterClose(MemoryStore):
    def close(self):
        pass


class PublishesBeforeItIsComplete(MemoryStore):
    def put(self, keys, sources, hints=None):
        results = super().put(keys, sources, hints)
        complete = dict(self._payloads)
        self._payloads.update({key: bytes(len(data)) for key, data in complete.items()})
        time.sleep(0.0001)
        self._payloads.update(complete)
        return results


class ListsEveryPrefix(MemoryStore):
    def list(self, _prefix=""):
        return super().list()


class CountsDiscardsAsEvictions(MemoryStore):
    def discard(self, keys):
        self._evict([key for key in dict.fromkeys(keys) if key in self._sizes])


BROKEN = {
    KeepsViewsOfSources: "test_changing_a_source_after_put_changes_no_object",
    KeepsViewsOfTargets: "test_changing_a_target_after_get_changes_no_object",
    OverwritesOnPut: "test_a_second_put_keeps_the_first_bytes",
    StoresTheLastTwin: "test_the_first_of_two_twins_in_a_batch_is_stored",
    RenewsOnContains: "test_looking_and_failing_renew_nothing",
    NeverRenews: "test_an_object_that_was_read_outlives_older_reads",
    IgnoresCapacity: "test_the_capacity_is_never_exceeded",
    WastesCapacity: "test_no_object_goes_while_there_is_room",
    EvictsInVain: "test_an_object_larger_than_the_store_is_refused_and_evicts_nothing",
    PutsKeyByKey: "test_what_a_batch_stores_is_there_when_it_returns",
    AcceptsOneByteTooMany: "test_a_segment_outside_every_region_refuses_the_call",
    NeverUnregisters: "test_a_region_is_unusable_after_unregister_and_its_buffer_may_come_back",
    WritesWhatFits: "test_a_target_of_another_size_is_corrupt_and_stays_untouched",
    CallsAnotherSizeAbsent: "test_a_target_of_another_size_is_corrupt_and_stays_untouched",
    ReversesSegments: "test_segments_are_concatenated_in_their_order",
    FoldsCase: "test_every_legal_key_is_accepted",
    RefusesToDiscardTheAbsent: "test_a_discarded_object_is_gone_and_may_be_put_anew",
    WorksAfterClose: "test_a_closed_store_refuses_everything_but_close",
    PublishesBeforeItIsComplete: "test_threads_get_exactly_what_was_put",
    ListsEveryPrefix: "test_a_store_that_lists_shows_every_object_and_its_size",
    CountsDiscardsAsEvictions: "test_a_store_that_counts_counts_right",
}


@pytest.fixture
def unshrunk():
    """Let hypothesis stop at the first failure: that there is one is enough here."""
    before = settings.get_current_profile_name()
    settings.register_profile("unshrunk", phases=[Phase.generate], database=None)
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(before)


def suite_of(make_store) -> StoreTests:
    suite = StoreTests()
    suite.make_store = make_store
    return suite


@pytest.mark.parametrize(("broken", "example"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_each_broken_promise_fails_its_example(broken, example):
    getattr(suite_of(MemoryStore), example)()
    with pytest.raises((Exception, pytest.fail.Exception)):
        getattr(suite_of(broken), example)()


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    "broken",
    [OverwritesOnPut, StoresTheLastTwin, WritesWhatFits, CallsAnotherSizeAbsent, ReversesSegments],
)
def test_the_machine_tells_an_unbounded_store_from_a_dict(broken):
    with pytest.raises(AssertionError):
        run_store_machine(broken, max_examples=500)


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize("broken", [IgnoresCapacity, WastesCapacity, EvictsInVain, PutsKeyByKey])
def test_the_machine_sees_what_the_capacity_does_not_force(broken):
    with pytest.raises(AssertionError):
        run_store_machine(broken, capacity_bytes=100, max_examples=500)


@pytest.mark.parametrize(
    "example",
    ["test_the_capacity_is_never_exceeded", "test_an_object_that_was_read_outlives_older_reads"],
)
def test_a_store_whose_capacity_or_order_is_its_own_skips_what_it_does_not_promise(example):
    suite = suite_of(MemoryStore)
    suite.capacity_objects, suite.is_lru = None, False
    with pytest.raises(pytest.skip.Exception):
        getattr(suite, example)()


def test_a_suite_without_a_store_says_so():
    with pytest.raises(NotImplementedError):
        StoreTests().test_hints_are_accepted()
