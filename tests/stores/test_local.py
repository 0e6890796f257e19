import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from hybridkv.errors import StoreClosedError
from hybridkv.stores.base import GetResult, PutHint, PutResult
from hybridkv.stores.eviction import LruStamps
from hybridkv.stores.local.geometry import ARENA_SHIFT, BUCKET_WORDS, KEY_WORD, Field, Geometry
from hybridkv.stores.local.index import BucketIndex
from hybridkv.stores.local.putting import STEP_KEYS
from hybridkv.stores.local.slots import SlotTable
from hybridkv.stores.local.store import LocalStore
from hybridkv.testing.stores import StoreTests, Workbench, payload, run_store_machine

SLOT = 4096  # the smallest place that an object takes
OK, ABSENT, CORRUPT = GetResult.OK, GetResult.ABSENT, GetResult.CORRUPT
STORED, ALREADY, REFUSED = PutResult.STORED, PutResult.ALREADY, PutResult.REFUSED


class TestLocalStore(StoreTests):
    object_bytes = SLOT

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path / "store"

    def make_store(self, capacity_bytes):
        return LocalStore(self.path, 1000 * SLOT if capacity_bytes is None else capacity_bytes)


class TestTwoLocalStoresOnOneDirectory(TestLocalStore):
    """Another store is open on the directory all the time, and opens anew between the tests' calls."""

    def make_store(self, capacity_bytes):
        self.other = super().make_store(capacity_bytes)
        return super().make_store(capacity_bytes)


@pytest.fixture
def fresh_store(tmp_path):
    def make(capacity_bytes):
        path = Path(tempfile.mkdtemp(dir=tmp_path)) / "store"
        return LocalStore(path, 100 * SLOT if capacity_bytes is None else capacity_bytes)

    return make


def test_a_store_with_room_equals_a_dict(fresh_store):
    run_store_machine(fresh_store, object_bytes=(16, 4000, SLOT))


def test_a_full_store_gives_up_only_what_the_capacity_forces(fresh_store):
    run_store_machine(fresh_store, capacity_bytes=4 * SLOT, object_bytes=(4000, 4040, SLOT))


# --- a store of 64 slots in chunks of 4, which a second store shares ---------------------------------------


class Points:
    """Runs actions between the steps of a store's protocols, once each."""

    def __init__(self) -> None:
        self.actions = {}

    def __call__(self, point: str) -> None:
        self.actions.pop(point, str)()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def points():
    return Points()


@pytest.fixture
def bench(path, points):
    bench = Workbench(LocalStore(path, 64 * SLOT, at_point=points), 600 * SLOT)
    yield bench
    bench.store.close()


def vanish(store):
    """Leave what a killed process leaves: the file of its id, but no lock."""
    os.close(store._directory._own_fd)
    store._directory._own_fd = -1


@pytest.fixture
def other(bench, path):  # noqa: ARG001 - it makes the directory
    other = Workbench(LocalStore(path), 200 * SLOT)
    yield other
    other.store.close()


def put_many(bench, keys, num_bytes=SLOT):
    return bench.store.put(keys, [bench.source(payload(key, num_bytes)) for key in keys])


def slot_of(store, key):
    (info,) = [slot for slot in store._table.published().tolist() if key_at(store, slot) == key]
    return info


def key_at(store, slot):
    record = store._table.records[slot]
    return bytes(record[KEY_WORD:])[: int(record[Field.KEY_CHARS])].decode()


def test_the_first_of_two_processes_that_put_a_key_wins(bench, other, points):
    data = payload(0, SLOT)
    points.actions["put: one payload copied"] = lambda: other.put("a", data)
    assert bench.put("a", payload(1, SLOT)) is ALREADY
    assert bench.get("a", SLOT) == (OK, data)
    assert bench.store.check().reserved_objects == 0


def test_what_is_evicted_while_it_is_copied_is_absent(bench, other, monkeypatch):
    bench.put("a", payload("a", SLOT))
    for evict in (lambda: other.store.discard(["a"]), lambda: move_chunks(other)):
        bench.put("a", payload("a", SLOT))
        places = bench.store._table.places

        def places_late(slots, evict=evict, places=places):
            evict()
            return places(slots)

        with monkeypatch.context() as patch:
            patch.setattr(bench.store._table, "places", places_late)
            assert bench.get("a", SLOT)[0] is ABSENT
    assert bench.store.stats().corrupt_objects == 0


def move_chunks(bench):
    """Make every chunk change its class."""
    put_many(bench, [f"large/{idx}" for idx in range(32)], 2 * SLOT)


def test_a_put_that_fails_gives_its_reservation_back(bench, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("hybridkv.stores.local.putting.checksum", fail)
        with pytest.raises(RuntimeError, match="broken"):
            put_many(bench, ["a", "b"])
    assert bench.store.check().reserved_objects == 0
    assert bench.store.contains(["a", "b"]) == [False, False]
    assert put_many(bench, [f"{idx}" for idx in range(64)]) == [STORED] * 64


@pytest.mark.parametrize("point", ["publish: record written", "publish: readable", "publish: indexed"])
def test_a_put_that_fails_while_it_publishes_leaves_whole_objects_or_none(bench, points, point):
    def fail():
        raise RuntimeError("broken")

    points.actions[point] = fail
    with pytest.raises(RuntimeError, match="broken"):
        put_many(bench, ["a", "b"])
    report = bench.store.check()
    assert (report.num_errors, report.reserved_objects) == (0, 0)
    assert report.objects == sum(bench.store.contains(["a", "b"]))
    assert put_many(bench, [f"{idx}" for idx in range(64)]) == [STORED] * 64


def test_a_put_never_evicts_what_a_reader_began_to_use_meanwhile(bench, other, points):
    put_many(bench, [f"old/{idx}" for idx in range(64)])
    points.actions["put: one payload copied"] = lambda: other.get("old/1", SLOT)
    keys = [f"new/{idx}" for idx in range(STEP_KEYS + 10)]
    results = put_many(bench, keys)
    assert results == [STORED] * 64 + [REFUSED] * (len(keys) - 64)
    put_many(bench, [f"old/{idx}" for idx in range(60)])
    assert bench.store.contains(["new/63"]) == [True]


def test_what_a_put_finds_stored_is_not_evicted_by_it(bench):
    keys = [f"old/{idx}" for idx in range(64)]
    put_many(bench, keys)
    assert put_many(bench, ["new", keys[0]]) == [STORED, ALREADY]
    assert bench.store.contains([*keys[:2], "new"]) == [True, False, True]


def test_a_prompt_larger_than_a_step_is_put_in_steps(path):
    bench = Workbench(LocalStore(path, 1000 * SLOT), 1000 * SLOT)
    keys = [f"{idx}" for idx in range(3 * STEP_KEYS)]
    assert put_many(bench, keys) == [STORED] * len(keys)
    assert bench.store.contains(keys) == [True] * len(keys)
    targets = [bench.lay_out(SLOT) for _ in keys]
    assert bench.store.get(keys, targets) == [OK] * len(keys)


def test_a_second_twin_shares_the_fate_of_the_first(bench):
    huge = bench.lay_out(5 * SLOT)
    assert bench.store.put(["a", "a"], [huge, bench.lay_out(SLOT)]) == [REFUSED, STORED]
    keys = [f"{idx}" for idx in range(64)] + ["late", "late"]
    assert put_many(bench, keys)[-2:] == [REFUSED, REFUSED]


def test_large_objects_come_back_as_they_were_put(path):
    bench = Workbench(LocalStore(path, 32 * 2**20), 8 * 2**20)
    data = payload(0, 2 * 2**20 - 1)
    assert bench.put("a", data, 2) is STORED
    assert bench.get("a", len(data), 3) == (OK, data)


def test_keys_of_different_lengths_are_told_apart(bench):
    keys = ["x" * length for length in (200, 1, 8, 9, 16, 199)]
    assert put_many(bench, keys) == [STORED] * 6
    for key in reversed(keys):
        assert bench.get(key, SLOT) == (OK, payload(key, SLOT))
    bench.store.discard(keys[:1])
    assert put_many(bench, ["y"]) == [STORED]
    assert bench.store.contains(["y", *keys]) == [True, False, *[True] * 5]


def test_a_policy_of_its_own_gets_the_hints_and_orders_eviction(path):
    class LongestPrefixFirst(LruStamps):
        def stored(self, now, count, hints):  # noqa: ARG002
            seen.append([hint.prefix for hint in hints])
            return np.array([1000 - hint.prefix for hint in hints], dtype=np.uint64)

    seen = []
    for idx in range(5):
        bench = Workbench(LocalStore(path, 4 * SLOT, policy=LongestPrefixFirst()), 64 * SLOT)
        hint = PutHint(parent=None, prefix=idx, spec_group=0, kept_boundary=True)
        bench.store.put([f"{idx}"], [bench.source(payload(idx, SLOT))], [hint])
    assert seen == [[0], [1], [2], [3], [4]]
    assert bench.store.contains([f"{idx}" for idx in range(5)]) == [True, True, True, False, True]


def test_chunks_go_to_the_class_that_is_used(bench):
    put_many(bench, [f"small/{idx}" for idx in range(64)])
    assert put_many(bench, [f"large/{idx}" for idx in range(32)], 2 * SLOT) == [STORED] * 32
    assert put_many(bench, [f"odd/{idx}" for idx in range(16)], 3 * SLOT) == [STORED] * 16
    stats = bench.store.stats()
    assert (stats.objects, stats.used_bytes) == (16, 48 * SLOT)
    assert (stats.evicted_objects, stats.evicted_bytes) == (96, 128 * SLOT)


def test_the_last_chunk_may_be_shorter(path):
    geometry = Geometry.of(35 * SLOT + 100)
    assert (geometry.capacity_bytes, geometry.chunk_bytes, geometry.num_chunks) == (35 * SLOT, 2 * SLOT, 18)
    bench = Workbench(LocalStore(path, 35 * SLOT + 100), 64 * SLOT)
    assert put_many(bench, [f"{idx}" for idx in range(36)]) == [STORED] * 35 + [REFUSED]
    assert put_many(bench, [f"large/{idx}" for idx in range(17)], 2 * SLOT).count(STORED) == 17


def test_a_shorter_last_chunk_changes_its_class_too(path):
    bench = Workbench(LocalStore(path, 159 * SLOT), 400 * SLOT)
    assert put_many(bench, [f"old/{idx}" for idx in range(71)], 2 * SLOT) == [STORED] * 71
    assert put_many(bench, [f"small/{idx}" for idx in range(159)]) == [STORED] * 159


def test_a_last_chunk_too_short_for_the_size_that_needs_room_is_not_emptied_for_it(path):
    bench = Workbench(LocalStore(path, 159 * SLOT), 600 * SLOT)  # 17 chunks of 9 slots, one of 6
    assert put_many(bench, [f"old/{idx}" for idx in range(18)], 5 * SLOT) == [STORED] * 18
    results = put_many(bench, [f"large/{idx}" for idx in range(18)], 9 * SLOT)
    assert results == [STORED] * 17 + [REFUSED]
    assert bench.store.stats().objects == 17 + 1


def test_reservations_of_a_store_that_vanished_are_free_again(bench, path):
    other = LocalStore(path)
    put_many(bench, [f"old/{idx}" for idx in range(64)])
    with other._directory.locked():
        other._table.take(other._table.published()[:32])
    assert bench.store.check().reserved_objects == 32
    assert put_many(bench, [f"new/{idx}" for idx in range(64)]).count(STORED) == 32
    vanish(other)
    assert put_many(bench, [f"newer/{idx}" for idx in range(64)]) == [STORED] * 64
    assert bench.store.check().reserved_objects == 0


def test_another_size_gets_the_chunks_in_which_a_store_that_vanished_had_reservations(bench, path):
    other = LocalStore(path)
    put_many(bench, [f"old/{idx}" for idx in range(64)])
    with other._directory.locked():
        other._table.take(other._table.published()[::4])  # one in each chunk
    vanish(other)
    assert put_many(bench, [f"large/{idx}" for idx in range(32)], 2 * SLOT) == [STORED] * 32


def test_a_late_readers_stamp_hides_no_reservation_of_a_store_that_vanished(bench, path):
    other = LocalStore(path)
    put_many(bench, [f"old/{idx}" for idx in range(64)])
    with other._directory.locked():
        reserved = other._table.published()[:32]
        other._table.take(reserved)
    bench.store._table.served(reserved, bench.store._table.now())
    vanish(other)
    assert put_many(bench, [f"new/{idx}" for idx in range(64)]) == [STORED] * 64


def test_calls_in_flight_end_before_the_store_closes(bench, points):
    closer = threading.Thread(target=bench.store.close)

    def close_meanwhile():
        closer.start()
        while not bench.store._gate._why_closed:
            pass

    points.actions["put: one payload copied"] = close_meanwhile
    assert bench.put("a", payload(0, SLOT)) is STORED
    closer.join()
    with pytest.raises(StoreClosedError):
        bench.contains("a")


# --- damage ------------------------------------------------------------------------------------------------


def flip_payload(store, key):
    place, _ = store._table.places(np.array([slot_of(store, key)]))
    store._directory.arena[int(place[0]) + 7] ^= 1


def test_a_flipped_byte_is_corrupt_once_and_then_absent(bench, other):
    put_many(bench, ["a", "b"])
    flip_payload(other.store, "a")
    assert bench.get("a", SLOT)[0] is CORRUPT
    assert bench.get("a", SLOT)[0] is ABSENT
    assert bench.get("b", SLOT) == (OK, payload("b", SLOT))
    assert bench.store.stats().corrupt_objects == 1
    assert bench.put("a", payload("a", SLOT)) is STORED


@pytest.mark.parametrize(
    ("word", "bit"),
    [(Field.HASH, 40), (Field.CHECKSUM, 40), (Field.NUM_BYTES, 40), (Field.KEY_CHARS, 40), (KEY_WORD, 0)],
)
def test_a_damaged_record_is_never_served_and_is_found_by_check(bench, word, bit):
    put_many(bench, ["a", "b"])
    bench.store._table.records[slot_of(bench.store, "a"), word] ^= np.uint64(1 << bit)
    assert bench.store.check(fix=True).num_errors == 1
    assert bench.get("a", SLOT)[0] is ABSENT
    assert bench.store.check().num_errors == 0
    assert bench.get("b", SLOT) == (OK, payload("b", SLOT))


def test_a_damaged_size_is_corrupt(bench):
    bench.put("a", payload(0, SLOT))
    bench.store._table.records[slot_of(bench.store, "a"), Field.NUM_BYTES] = 4 * SLOT
    assert bench.get("a", 4 * SLOT)[0] is CORRUPT


def test_check_finds_and_fixes_a_damaged_index(bench):
    keys = [f"{idx}" for idx in range(20)]
    put_many(bench, keys)
    bench.store._table.index._flat[:] = 0xFFFF_FFFF_FFFF_FFFF
    assert bench.store.contains(keys) == [False] * 20
    report = bench.store.check()
    assert (report.objects, report.lost_objects, report.corrupt_objects) == (20, 20, 0)
    assert report.stale_entries == len(bench.store._table.index._flat)
    assert bench.store.check(fix=True).is_fixed
    assert bench.store.contains(keys) == [True] * 20
    assert bench.store.check().stale_entries == 0


def test_a_repair_that_is_interrupted_loses_nothing_and_hides_nothing(bench, other, monkeypatch):
    keys = [f"{idx}" for idx in range(20)]
    put_many(bench, keys)

    def interrupt(*_):
        seen.append(other.store.contains(keys))
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr(SlotTable, "reindex", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.store.check(fix=True)
    assert seen == [[True] * 20]
    assert bench.store.check().num_errors == 0


def test_check_fixes_entries_at_a_wrong_place(bench):
    put_many(bench, ["a"])
    index = bench.store._table.index._flat
    index[:] = np.roll(index, BUCKET_WORDS)
    assert bench.store.check(fix=True).lost_objects == 1
    report = bench.store.check()
    assert (report.objects, report.num_errors, report.stale_entries) == (1, 0, 0)


def test_an_object_that_was_lost_and_put_again_is_kept_once(bench):
    bench.put("a", payload("a", SLOT))
    bench.store._table.index._flat[:] = 0
    assert bench.put("a", payload("a", SLOT)) is STORED
    assert bench.store.check(fix=True).lost_objects == 1
    assert bench.store.check().objects == 1
    assert bench.get("a", SLOT) == (OK, payload("a", SLOT))


def test_check_of_an_empty_store_finds_nothing(bench):
    report = bench.store.check()
    assert (report.objects, report.num_errors, report.used_bytes) == (0, 0, 0)


def test_an_object_for_which_the_index_has_no_room_is_refused(bench, monkeypatch):
    monkeypatch.setattr(
        BucketIndex, "insert", lambda _self, hashes, _slots: np.zeros(len(hashes), dtype=bool)
    )
    assert bench.put("a", payload(0, SLOT)) is REFUSED
    assert bench.store.stats().objects == 0
    assert bench.store.check().reserved_objects == 0


# --- the index ---------------------------------------------------------------------------------------------


def test_full_buckets_overflow_into_their_twins_and_then_refuse():
    index = BucketIndex(np.zeros(16 * 8, dtype=np.uint64))
    # All hashes have buckets 1 and 2.
    hashes = (np.arange(40, dtype=np.uint64) << np.uint64(40)) | np.uint64(2 << 21 | 1)
    slots = np.arange(40)
    done = index.insert(hashes, slots)
    assert done.sum() == 16
    positions, found = index.candidates(hashes)
    assert sorted(positions[positions == found].tolist()) == np.flatnonzero(done).tolist()
    index.delete(hashes, slots)
    assert not index._flat.any()


def test_hashes_that_look_alike_are_candidates_of_each_other():
    index = BucketIndex(np.zeros(16 * 8, dtype=np.uint64))
    hashes = np.full(5, 1 << 40, dtype=np.uint64)
    assert index.insert(hashes, np.arange(5)).all()
    positions, found = index.candidates(hashes)
    assert set(zip(positions.tolist(), found.tolist(), strict=True)) == {
        (position, slot) for position in range(5) for slot in range(5)
    }


def test_slots_begin_half_a_page_apart_from_users_memory(bench):
    bench.put("a", payload(0, SLOT))
    place, _ = bench.store._table.places(np.array([slot_of(bench.store, "a")]))
    assert int(place[0]) % 4096 == ARENA_SHIFT
