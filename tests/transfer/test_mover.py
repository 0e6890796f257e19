"""Jobs between block memory and a store: every end is told once, and nothing is touched after a cancel."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from hybridkv.clock import ManualClock
from hybridkv.errors import ConfigError, StoreUnavailableError
from hybridkv.stores.base import PutResult
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import Fault, FaultyStore
from hybridkv.transfer.guard import GuardSettings
from hybridkv.transfer.mover import Mover
from hybridkv.transfer.moves import MoverSettings, Outcome
from tests.transfer.bench import Device, move, small_layout

LAYOUT = small_layout()
PATIENT = MoverSettings(slot_bytes=1024, num_slots=2)


@contextmanager
def moving(store, device=None, settings=PATIENT, clock=None):
    device = Device(LAYOUT) if device is None else device
    mover = Mover(store, device.io, settings, clock=clock or ManualClock())
    try:
        yield mover, device
    finally:
        mover.close(timeout_s=20)
        mover.close()


def ends(mover, count=1):
    """Wait for jobs to end and return them by id, with the ids of staged saves."""
    found, staged = {}, []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, "the jobs did not end"
        new_staged, ended = mover.poll()
        staged += new_staged
        for one in ended:
            assert one.job_id not in found, "a job ends once"
            found[one.job_id] = one
        time.sleep(0.001)
    assert mover.drain(10)
    return found, staged + mover.poll()[0]


def test_what_was_saved_is_loaded_into_other_blocks():
    with moving(MemoryStore()) as (mover, device):
        before = device.copy()
        mover.save(1, (move(LAYOUT, 0, ["a", "b"], [3, 4]), move(LAYOUT, 1, ["w"], [7])))
        found, staged = ends(mover)
        assert (found[1].outcome, found[1].marks, staged) == (Outcome.DONE, (b"\1\1", b"\1"), [1])
        device.fill(seed=9)
        after = device.copy()
        mover.load(2, (move(LAYOUT, 0, ["b", "a"], [10, 11]), move(LAYOUT, 1, ["w"], [12])))
        found, staged = ends(mover)
        assert (found[2].outcome, staged) == (Outcome.DONE, [])
        for layer in (0, 1):
            assert (device.arrays[0][layer][10] == before[layer][4]).all()
            assert (device.arrays[0][layer][11] == before[layer][3]).all()
        assert (device.arrays[1][0][12] == before[2][7]).all()
        for now, then in zip(device.every_array(), after, strict=True):
            untouched = [i for i in range(len(now)) if i not in (10, 11, 12)]
            assert (now[untouched] == then[untouched]).all()
        assert (mover.metrics().jobs, mover.metrics().slots_held) == (0, 0)


def test_jobs_above_the_staging_budget_are_moved_in_turns():
    with moving(MemoryStore()) as (mover, device):
        keys = [f"k{i}" for i in range(30)]
        before = device.copy()
        mover.save(1, (move(LAYOUT, 0, keys, range(5, 35)),))
        assert ends(mover)[0][1].outcome is Outcome.DONE
        device.fill(seed=9)
        mover.load(2, (move(LAYOUT, 0, keys, range(5, 35)),))
        assert ends(mover)[0][2].outcome is Outcome.DONE
        assert all(
            (now[5:35] == then[5:35]).all() for now, then in zip(device.arrays[0], before, strict=False)
        )


def test_an_object_above_a_slot_fails_alone(caplog):
    store = MemoryStore()
    with moving(store, settings=MoverSettings(slot_bytes=128, num_slots=2)) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]), move(LAYOUT, 1, ["w"], [3])))
        found, staged = ends(mover)
        assert (found[1].outcome, found[1].marks, staged) == (Outcome.FAILED, (b"\0", b"\1"), [1])
        assert "group 0 has 256 bytes, a staging slot only 128; raise slot_bytes" in caplog.text
        store.get = None
        caplog.clear()
        mover.load(2, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][2].marks == (b"\0",), "it was not asked for"
        assert "raise slot_bytes" in caplog.text


def test_an_absent_object_fails_the_load_and_is_told():
    with moving(MemoryStore()) as (mover, device):
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        ends(mover)
        before = device.copy()
        mover.load(2, (move(LAYOUT, 0, ["a", "gone"], [10, 11]),))
        found, _ = ends(mover)
        assert (found[2].outcome, found[2].marks) == (Outcome.FAILED, (b"\0\1",))
        assert all((now == then).all() for now, then in zip(device.every_array(), before, strict=True))


def test_a_corrupt_object_fails_the_load_and_is_discarded():
    store = MemoryStore()
    with moving(store) as (mover, _):
        small = np.zeros(8, np.uint8)
        region = store.register(small.data)
        store.put(["a"], [[(region.address, 8)]])
        mover.load(1, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][1].outcome is Outcome.FAILED
        assert store.contains(["a"]) == [False]
        mover.save(2, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][2].outcome is Outcome.DONE


def test_a_refused_put_is_tried_again_and_then_told():
    class Refusing(MemoryStore):
        refusals = 2

        def put(self, keys, sources, hints=None):
            if self.refusals:
                type(self).refusals -= 1
                return (
                    [PutResult.STORED, *[PutResult.REFUSED] * (len(keys) - 1)]
                    if len(keys) > 1
                    else [PutResult.REFUSED]
                )
            return super().put(keys, sources, hints)

    clock = ManualClock()
    with moving(Refusing(), clock=clock) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a", "b"], [3, 4]),))
        found, _ = ends(mover)
        assert (found[1].outcome, found[1].marks) == (Outcome.DONE, (b"\1\1",))
        assert clock.now_s() == pytest.approx(0.03 + 0.06)
        Refusing.refusals = 100
        mover.save(2, (move(LAYOUT, 0, ["c", "d"], [3, 4]),))
        found, _ = ends(mover)
        assert (found[2].outcome, found[2].marks) == (Outcome.FAILED, (b"\1\0",))
        assert mover.metrics().slots_held == 0


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.REFUSED])
def test_one_failed_object_of_a_save_does_not_count_as_stored(fault):
    store = FaultyStore(MemoryStore())
    store.inject("b", *[fault] * 10)
    with moving(store) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a", "b", "c"], [3, 4, 5]),))
        found, _ = ends(mover)
        assert (found[1].outcome, found[1].marks) == (Outcome.FAILED, (b"\1\0\1",))


def test_a_store_that_is_gone_fails_jobs_and_the_breaker_spares_it_for_a_while():
    class Gone(MemoryStore):
        is_gone, calls = True, 0

        def put(self, keys, sources, hints=None):
            self.calls += 1
            if self.is_gone:
                raise StoreUnavailableError("gone")
            return super().put(keys, sources, hints)

    store, clock = Gone(), ManualClock()
    settings = MoverSettings(slot_bytes=1024, num_slots=2, guard=GuardSettings(failures_to_open=2, open_s=5))
    with moving(store, settings=settings, clock=clock) as (mover, _):
        for job_id in range(1, 5):
            mover.save(job_id, (move(LAYOUT, 0, [f"k{job_id}"], [3]),))
            assert ends(mover)[0][job_id].outcome is Outcome.FAILED
        assert store.calls == 2
        assert mover.metrics().calls.failed == 2
        assert mover.metrics().calls.is_open
        clock.sleep(6)
        mover.save(5, (move(LAYOUT, 0, ["k5"], [3]),))
        assert ends(mover)[0][5].outcome is Outcome.FAILED
        assert store.calls == 3
        store.is_gone = False
        clock.sleep(6)
        for job_id in (6, 7):
            mover.save(job_id, (move(LAYOUT, 0, [f"k{job_id}"], [3]),))
            assert ends(mover)[0][job_id].outcome is Outcome.DONE
        assert mover.metrics().slots_held == 0


def test_a_hanging_call_is_left_behind_and_its_slot_comes_back_when_it_ends():
    hang = threading.Event()

    class Hanging(MemoryStore):
        def get(self, keys, targets):
            hang.wait()
            return super().get(keys, targets)

    settings = MoverSettings(
        slot_bytes=1024, num_slots=1, slot_timeout_s=0.05, guard=GuardSettings(timeout_s=0.05)
    )
    with moving(Hanging(), settings=settings) as (mover, device):
        before = device.copy()
        mover.load(1, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][1].outcome is Outcome.FAILED
        assert mover.metrics().slots_held == 1
        mover.load(2, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][2].outcome is Outcome.FAILED
        hang.set()
        deadline = time.monotonic() + 30
        while mover.metrics().slots_held:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert all((now == then).all() for now, then in zip(device.every_array(), before, strict=True))


class Gated(MemoryStore):
    """A store whose puts and gets wait at a gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.arrived = threading.Event(), threading.Event()

    def put(self, keys, sources, hints=None):
        self.arrived.set()
        self.gate.wait()
        return super().put(keys, sources, hints)

    def get(self, keys, targets):
        results = super().get(keys, targets)
        self.arrived.set()
        self.gate.wait()
        return results


def test_a_load_that_was_cancelled_never_touches_its_blocks():
    store = Gated()
    with moving(store) as (mover, device):
        store.gate.set()
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        ends(mover)
        store.gate.clear()
        store.arrived.clear()
        before = device.copy()
        mover.load(2, (move(LAYOUT, 0, ["a"], [10]),))
        store.arrived.wait()
        mover.cancel(2)
        store.gate.set()
        assert ends(mover)[0][2].outcome is Outcome.CANCELLED
        mover.cancel(2)
        assert all((now == then).all() for now, then in zip(device.every_array(), before, strict=True))


def test_a_save_is_staged_before_the_store_has_it_and_a_later_change_of_its_blocks_does_not_show():
    store = Gated()
    with moving(store) as (mover, device):
        before = device.copy()
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        store.arrived.wait()
        deadline = time.monotonic() + 30
        while mover.poll()[0] != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        device.fill(seed=9)
        store.gate.set()
        assert ends(mover)[0][1].outcome is Outcome.DONE
        mover.load(2, (move(LAYOUT, 0, ["a"], [5]),))
        ends(mover)
        assert (device.arrays[0][0][5] == before[0][3]).all()


def test_a_cancelled_save_that_was_not_staged_stores_nothing_more():
    store = Gated()
    settings = MoverSettings(slot_bytes=256, num_slots=1)
    with moving(store, settings=settings) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a", "b"], [3, 4]),))
        store.arrived.wait()
        mover.cancel(1)
        store.gate.set()
        found, staged = ends(mover)
        assert (found[1].outcome, found[1].marks, staged) == (Outcome.CANCELLED, (b"\1\0",), [1])
        assert mover.metrics().slots_held == 0


def test_a_wrong_block_fails_its_job_and_the_thread_lives_on(caplog):
    with moving(MemoryStore()) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a"], [0]),))
        mover.load(2, (move(LAYOUT, 0, ["a"], [0]),))
        mover.save(3, (move(LAYOUT, 0, ["a"], [3]),))
        found, _ = ends(mover, 3)
        assert [found[i].outcome for i in (1, 2, 3)] == [Outcome.FAILED, Outcome.FAILED, Outcome.DONE]
        assert "staging part 0 of save 1 failed" in caplog.text
        assert mover.metrics().slots_held == 0


def test_a_bug_in_a_store_fails_the_job_and_frees_the_slot():
    class Broken(MemoryStore):
        def put(self, _keys, _sources, _hints=None):
            raise ZeroDivisionError

        def get(self, _keys, _targets):
            raise ZeroDivisionError

    with moving(Broken()) as (mover, _):
        for job_id in range(1, 4):
            mover.save(job_id, (move(LAYOUT, 0, ["a"], [3]),))
            mover.load(10 + job_id, (move(LAYOUT, 0, ["a"], [3]),))
        found, _ = ends(mover, 6)
        assert {one.outcome for one in found.values()} == {Outcome.FAILED}
        assert mover.metrics().slots_held == 0


@pytest.mark.parametrize("where", ["store", "blocks"])
def test_what_would_end_a_thread_fails_the_job_and_the_thread_lives_on(where, caplog):
    def end_the_thread(*_):
        raise SystemExit(3)

    store = MemoryStore()
    with moving(store) as (mover, device):
        broken, names = (store, ("put", "get")) if where == "store" else (device.io, ("gather", "scatter"))
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        ends(mover)
        for name in names:
            setattr(broken, name, end_the_thread)
        mover.save(2, (move(LAYOUT, 0, ["b"], [3]),))
        mover.load(3, (move(LAYOUT, 0, ["a"], [4]),))
        found, staged = ends(mover, 2)
        assert {one.outcome for one in found.values()} == {Outcome.FAILED}
        assert staged == [2]
        assert "SystemExit" in caplog.text
        for name in names:
            delattr(broken, name)
        mover.save(4, (move(LAYOUT, 0, ["b"], [3]),))
        assert ends(mover)[0][4].outcome is Outcome.DONE
        mover.load(5, (move(LAYOUT, 0, ["a"], [4]),))
        assert ends(mover)[0][5].outcome is Outcome.DONE
        assert mover.metrics().slots_held == 0


def test_no_store_call_moves_more_slices_than_allowed():
    sizes = []

    class Counting(MemoryStore):
        def put(self, keys, sources, hints=None):
            sizes.append(sum(map(len, sources)))
            return super().put(keys, sources, hints)

        def get(self, keys, targets):
            sizes.append(sum(map(len, targets)))
            return super().get(keys, targets)

    settings = MoverSettings(slot_bytes=1 << 16, num_slots=2, batch_objects=4)
    with moving(Counting(), settings=settings) as (mover, _):
        keys = [f"k{i}" for i in range(10)]
        mover.save(1, (move(LAYOUT, 0, keys, range(5, 15)),))
        assert ends(mover)[0][1].outcome is Outcome.DONE
        mover.load(2, (move(LAYOUT, 0, keys, range(15, 25)),))
        assert ends(mover)[0][2].outcome is Outcome.DONE
    assert sizes == [4, 4, 2] * 2


def test_a_save_that_asks_first_reads_only_the_blocks_of_absent_objects():
    store = MemoryStore()
    with moving(store) as (mover, device):
        mover.save(1, (move(LAYOUT, 0, ["b", "d"], [4, 6]),))
        ends(mover)
        read, gather = [], device.io.gather

        def noting(spec_group, blocks, memory):
            read.extend(blocks.ravel().tolist())
            gather(spec_group, blocks, memory)

        device.io.gather = noting
        before = device.copy()
        mover.save(2, (move(LAYOUT, 0, ["a", "b", "c", "d"], [3, 4, 5, 6]),), ask_first=True)
        found, staged = ends(mover)
        assert (found[2].outcome, found[2].marks, staged) == (Outcome.DONE, (b"\1\1\1\1",), [2])
        assert read == [3, 5]
        mover.load(3, (move(LAYOUT, 0, ["a", "c"], [10, 11]),))
        ends(mover)
        assert (device.arrays[0][0][[10, 11]] == before[0][[3, 5]]).all()


def test_a_save_that_asks_first_holds_up_no_other_and_stops_asking_once_cancelled():
    asked, go_on = [], threading.Event()

    class Slow(MemoryStore):
        def contains(self, keys):
            asked.append(keys)
            go_on.wait()
            return super().contains(keys)

    settings = MoverSettings(slot_bytes=256, num_slots=2)
    with moving(Slow(), settings=settings) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a", "b"], [3, 4]),), ask_first=True)
        mover.save(2, (move(LAYOUT, 0, ["c"], [5]),))
        found, staged = {}, []
        while 2 not in found:
            new, ended = mover.poll()
            staged += new
            found |= {one.job_id: one for one in ended}
            time.sleep(0.001)
        assert (found[2].outcome, staged) == (Outcome.DONE, [2])
        mover.cancel(1)
        go_on.set()
        assert ends(mover)[0][1].outcome is Outcome.CANCELLED
        assert asked == [["a"]]


class Short(MemoryStore):
    """Answers too few keys."""

    def put(self, keys, sources, hints=None):
        return super().put(keys, sources, hints)[1:]

    def get(self, keys, targets):
        return super().get(keys, targets)[:1]


def test_too_few_answers_fail_the_job_and_free_the_slot():
    with moving(Short()) as (mover, device):
        before = device.copy()
        for turn in range(3):
            mover.save(turn, (move(LAYOUT, 0, ["a", "b"], [3, 4]),))
            mover.load(10 + turn, (move(LAYOUT, 0, ["a", "b"], [5, 6]),))
        found, _ = ends(mover, 6)
        assert {one.outcome for one in found.values()} == {Outcome.FAILED}
        assert mover.metrics().slots_held == 0
        assert all((now == then).all() for now, then in zip(device.every_array(), before, strict=True))


def test_a_load_whose_last_copy_fails_is_not_done():
    with moving(MemoryStore()) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]), move(LAYOUT, 1, ["w"], [7])))
        ends(mover)
        mover.load(2, (move(LAYOUT, 0, ["a"], [10]), move(LAYOUT, 1, ["w"], [0])))
        found, _ = ends(mover)
        assert (found[2].outcome, found[2].marks) == (Outcome.FAILED, (b"\0", b"\0"))


def test_cancelled_loads_ask_the_store_for_nothing():
    store = Gated()
    with moving(store) as (mover, _):
        mover.load(1, (move(LAYOUT, 0, ["a"], [3]),))
        store.arrived.wait()
        asked, get = [], store.get
        store.get = lambda keys, targets: asked.extend(keys) or get(keys, targets)
        for job_id in range(2, 6):
            mover.load(job_id, (move(LAYOUT, 0, ["a"], [3]),))
            mover.cancel(job_id)
        store.gate.set()
        found, _ = ends(mover, 5)
        assert {found[job_id].outcome for job_id in range(2, 6)} == {Outcome.CANCELLED}
        assert asked == []


def test_close_ends_what_waits():
    store = Gated()
    with moving(store) as (mover, _):
        for job_id in range(1, 6):
            mover.load(job_id, (move(LAYOUT, 0, ["a"], [3]),))
        store.arrived.wait()
        threading.Timer(0.2, store.gate.set).start()
        mover.close(timeout_s=20)
        assert len(mover.poll()[1]) == 5


def test_a_full_queue_fails_jobs_at_once():
    store = Gated()
    settings = MoverSettings(slot_bytes=256, num_slots=1, queued_jobs=1)
    with moving(store, settings=settings) as (mover, _):
        for job_id in range(1, 12):
            mover.save(job_id, (move(LAYOUT, 0, [f"k{job_id}"], [3]),))
        store.gate.set()
        found, _ = ends(mover, 11)
        assert {one.outcome for one in found.values()} == {Outcome.DONE, Outcome.FAILED}


def test_puts_are_paced_to_the_write_bandwidth():
    clock = ManualClock()
    settings = MoverSettings(slot_bytes=256, num_slots=2, write_bytes_per_s=128)
    with moving(MemoryStore(), settings=settings, clock=clock) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a", "b", "c"], [3, 4, 5]),))
        assert ends(mover)[0][1].outcome is Outcome.DONE
        # Three puts of 256 bytes at 128 bytes a second: the second and the third wait two seconds each.
        assert clock.now_s() == pytest.approx(4.0)


def test_metrics_tell_what_is_under_way_and_what_happened():
    store = Gated()
    with moving(store) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        store.arrived.wait()
        mover.save(2, (move(LAYOUT, 0, ["b"], [3]),))
        busy = mover.metrics()
        assert (busy.jobs, busy.slots_held >= 1, busy.calls.calls) == (2, True, 0)
        assert busy.staging_bytes_held == busy.slots_held * 1024
        store.gate.set()
        ends(mover, 2)
        idle = mover.metrics()
        assert (idle.jobs, idle.queued_saves, idle.queued_loads, idle.slots_held) == (0, 0, 0, 0)
        assert (idle.calls.calls, idle.calls.late, idle.calls.failed, idle.calls.is_open) == (2, 0, 0, False)


def test_the_id_of_a_job_under_way_is_refused():
    store = Gated()
    with moving(store) as (mover, _):
        mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        with pytest.raises(ConfigError, match="started before"):
            mover.save(1, (move(LAYOUT, 0, ["a"], [3]),))
        store.gate.set()
        ends(mover)


def test_after_close_jobs_fail_at_once():
    with moving(MemoryStore()) as (mover, _):
        mover.close()
        mover.load(1, (move(LAYOUT, 0, ["a"], [3]),))
        assert ends(mover)[0][1].outcome is Outcome.FAILED
