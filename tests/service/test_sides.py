"""Scheduler side and worker sides together, over real block memory and a memory store."""

import pickle

import pytest

from hybridkv.clock import ManualClock
from hybridkv.errors import ConfigError, TransferError
from hybridkv.keys import BlockHasher, KeyScheme, Namespace
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.messages import VERSION, StepPlan, WorkerReport
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.service.worker import WorkerSide
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import FaultyStore
from hybridkv.transfer.moves import Ended, MoverSettings, Outcome
from tests.transfer.bench import Device, small_layout

PROMPT = list(range(1000))


def blob(tokens, length=None):
    return BlockHasher(hash_unit=16).hash_tokens(tokens[:length])


class Engine:
    """Scheduler side, one worker side a rank, and as much of an engine as they need."""

    def __init__(self, store, *, tp=1, k=1, clock=None, **settings):
        self.layout = small_layout(k=k, tp=tp)
        scheme = KeyScheme(Namespace(model_version="m"), self.layout, digest_bytes=32)
        self.driver = LookupDriver(store, scheme)
        self.side = SchedulerSide(self.driver, scheme, SchedulerSettings(**settings), clock=clock)
        self.devices = [Device(self.layout, seed=rank) for rank in range(tp)]
        self.workers = [
            WorkerSide(
                store,
                self.layout,
                device.io,
                rank=rank,
                settings=MoverSettings(slot_bytes=1024, num_slots=2),
                clock=ManualClock(),
            )
            for rank, device in enumerate(self.devices)
        ]

    def close(self):
        for worker in self.workers:
            worker.close()
            worker.close()
        self.driver.close()

    def run(self, ranks=None):
        """Send a step to the ranks, let them finish, and return what they changed; keep their events."""
        self.events = []
        plan = pickle.loads(pickle.dumps(self.side.take_step()))
        loaded, failed, released = [], [], set()
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].start(plan)
            assert self.workers[rank].drain(30)
            progress = self.side.report(pickle.loads(pickle.dumps(self.workers[rank].poll())))
            loaded += progress.loaded
            failed += progress.load_failed
            released |= progress.released
            self.events += progress.stored
        return loaded, failed, released

    def save(self, request_id, tokens, steps=(), tables=None):
        """Prefill a prompt from nothing in steps; return its tables."""
        tables = tables or [list(range(1, 30)), list(range(1, 30))]
        hit = self.side.find_hit(request_id, len(tokens), blob(tokens), may_load=False)
        assert hit == 0
        for stop in (*steps, len(tokens)):
            self.side.advanced(request_id, stop, tables)
            self.run()
        return tables


@pytest.fixture
def make():
    engines = []

    def start(store=None, **settings):
        engines.append(Engine(MemoryStore() if store is None else store, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("k", [1, 4])
def test_what_one_request_saved_another_one_loads_bit_for_bit(make, tp, k):
    engine = make(tp=tp, k=k)
    before = [device.copy() for device in engine.devices]
    engine.save("a", PROMPT[:205], steps=(70, 130))
    for device in engine.devices:
        device.fill(seed=99)
    assert engine.side.find_hit("b", 205, blob(PROMPT, 205)) == 192
    full, window = [0] * 12, [0] * 12
    full[:] = range(20, 32)
    window[10:] = [33, 34]
    assert engine.side.allocated("b", [full, window])
    assert engine.run() == (["b"], [], {*((0, i) for i in range(20, 32)), (1, 33), (1, 34)})
    for device, then in zip(engine.devices, before, strict=True):
        for layer in (0, 1):
            assert (device.arrays[0][layer][20:32] == then[layer][1:13]).all()
        assert (device.arrays[1][0][33:35] == then[2][11:13]).all()
    assert engine.side.is_idle
    assert engine.side.num_pinned == 0


def test_the_devices_own_blocks_are_neither_loaded_nor_touched(make):
    engine = make(k=4)
    engine.save("a", PROMPT[:129])
    assert engine.side.find_hit("b", 129, blob(PROMPT, 129), device_prefix=48) == 128
    before = engine.devices[0].copy()
    window = [0] * 8
    window[6:] = [33, 34]
    assert engine.side.allocated("b", [list(range(20, 28)), window])
    assert engine.run()[0] == ["b"]
    for layer in (0, 1):
        now = engine.devices[0].arrays[0][layer]
        assert (now[20:23] == before[layer][20:23]).all()
        assert (now[23:28] == before[layer][4:9]).all()


def test_saved_blocks_are_held_until_every_rank_has_staged_them(make):
    engine = make(tp=2)
    tables = [list(range(1, 30)), list(range(1, 30))]
    engine.side.find_hit("a", 64, blob(PROMPT, 64), may_load=False)
    held = engine.side.advanced("a", 64, tables)
    assert held == {(group, block) for group in (0, 1) for block in (1, 2, 3, 4)}
    assert engine.side.num_pinned == 8
    plan = engine.side.take_step()
    for rank, expected in ((0, frozenset()), (1, held)):
        engine.workers[rank].start(plan)
        assert engine.workers[rank].drain(30)
        assert engine.side.report(engine.workers[rank].poll()).released == expected
    assert engine.side.watermark("a") == (4, 4)


class FirstOnly(MemoryStore):
    """Stores the first object of each put and refuses the others, while ``is_full``."""

    is_full = True

    def put(self, keys, sources, hints=None):
        if not self.is_full:
            return super().put(keys, sources, hints)
        if all(self.contains(keys)):
            return [PutResult.ALREADY] * len(keys)
        first = [super().put(keys[:1], sources[:1])[0]] if not self.used else [PutResult.REFUSED]
        return first + [PutResult.REFUSED] * (len(keys) - 1)

    @property
    def used(self):
        return self.stats().objects


def test_what_is_not_stored_does_not_advance_the_ledger_and_is_saved_again(make):
    store = FirstOnly()
    engine = make(store)
    engine.side.find_hit("a", 96, blob(PROMPT, 96), may_load=False)
    tables = [list(range(1, 30)), list(range(1, 30))]
    engine.side.advanced("a", 64, tables)
    engine.run()
    assert engine.side.watermark("a") == (1, 0)
    assert engine.side.counters.objects_stored == 1
    assert [(event.spec_group, event.block_hashes) for event in engine.events] == [(0, blob(PROMPT, 16))]
    store.is_full = False
    engine.side.advanced("a", 96, tables)
    engine.run()
    assert engine.side.watermark("a") == (6, 6)


def test_an_events_parent_is_the_object_before_it_whenever_that_was_stored(make):
    class Refusing(MemoryStore):
        refused = ()

        def put(self, keys, sources, _hints=None):
            given = [idx for idx, key in enumerate(keys) if key not in self.refused]
            results = [PutResult.REFUSED] * len(keys)
            stored = super().put([keys[idx] for idx in given], [sources[idx] for idx in given])
            for idx, result in zip(given, stored, strict=True):
                results[idx] = result
            return results

    store = Refusing()
    engine = make(store)
    store.refused = engine.side._scheme.keys(0, 0, range(4), blob(PROMPT, 64))[1::2]
    tables = [list(range(1, 30)), [0] * 30]
    engine.side.find_hit("a", 64, blob(PROMPT, 64), may_load=False)
    engine.side.advanced("a", 64, tables)
    engine.run()
    names = [blob(PROMPT, 16 * (idx + 1))[-32:] for idx in range(4)]
    assert [(event.parent_hash, event.block_hashes) for event in engine.events] == [
        (b"", names[0]),
        (names[1], names[2]),
    ]
    store.refused = ()
    engine.side.advanced("a", 65, tables)
    engine.run()
    assert [(event.parent_hash, event.block_hashes) for event in engine.events] == [
        (names[0], names[1]),
        (names[2], names[3]),
    ]


def test_a_save_of_a_preempted_life_releases_its_own_blocks_only_and_leaves_the_next_ledger_alone(make):
    engine = make(tp=2)
    tables = [list(range(1, 5)), list(range(1, 5))]
    engine.side.find_hit("a", 64, blob(PROMPT, 64), may_load=False)
    held = engine.side.advanced("a", 64, tables)
    assert engine.side.forget("a") == held
    # It comes again with another prompt, before the ranks have heard of the first save.
    engine.side.find_hit("a", 64, blob(PROMPT[::-1], 64), may_load=False)
    new = engine.side.advanced("a", 64, [list(range(5, 9)), list(range(5, 9))])
    assert not new & held
    both = engine.side.take_step()
    old, young = (StepPlan(jobs=(job,)) for job in both.jobs)
    engine.workers[0].start(old)
    assert engine.workers[0].drain(30)
    assert engine.side.report(engine.workers[0].poll()).released == frozenset()
    assert engine.side.watermark("a") == (0, 0)
    engine.workers[1].start(old)
    assert engine.workers[1].drain(30)
    assert engine.side.report(engine.workers[1].poll()).released == held
    assert engine.side.watermark("a") == (0, 0), "what the old life stored is not the new one's"
    for worker, expected in zip(engine.workers, (frozenset(), new), strict=True):
        worker.start(young)
        assert worker.drain(30)
        assert engine.side.report(worker.poll()).released == expected
    assert engine.side.watermark("a") == (4, 4)


def test_null_blocks_are_never_stored(make):
    engine = make()
    engine.side.find_hit("a", 96, blob(PROMPT, 96), may_load=False)
    tables = [list(range(1, 7)), [0, 0, 0, 0, 5, 6]]
    held = engine.side.advanced("a", 96, tables)
    assert {block for group, block in held if group == 1} == {5, 6}
    engine.run()
    assert engine.side.watermark("a") == (6, 0)


def test_a_load_that_misses_one_group_fails_as_a_whole_and_the_next_lookup_knows(make):
    store = MemoryStore()
    engine = make(store)
    engine.save("a", PROMPT[:200])
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 192
    lost = engine.side._scheme.keys(1, 0, range(11, 12), blob(PROMPT, 200))
    store.discard(lost)
    store.contains = lambda keys: [True] * len(keys)  # the store claims it still
    window = [0] * 12
    window[10:] = [33, 34]
    engine.side.allocated("b", [list(range(20, 32)), window])
    loaded, failed, released = engine.run()
    assert (loaded, failed) == ([], ["b"])
    assert (1, 33) in released
    assert engine.side.counters.loads_failed == 1
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 176
    engine.side.forget("b")
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 192


def test_an_allocation_that_the_plan_does_not_fill_is_refused(make):
    engine = make()
    engine.save("a", PROMPT[:200])
    engine.side.find_hit("b", 200, blob(PROMPT, 200))
    with pytest.raises(TransferError, match="unfilled"):
        engine.side.allocated("b", [list(range(20, 32)), list(range(20, 32))])
    assert engine.side.counters.unfilled_blocks == 10
    assert engine.side.take_step() == StepPlan()


def loading(engine, request_id="b"):
    """Save a prompt, and plan a request's load of it; return the blocks to hold."""
    engine.save("a", PROMPT[:200])
    engine.side.forget("a")
    return load_again(engine, request_id)


def load_again(engine, request_id="b"):
    window = [0] * 12
    window[10:] = [33, 34]
    assert engine.side.find_hit(request_id, 200, blob(PROMPT, 200)) == 192
    return engine.side.allocated(request_id, [list(range(20, 32)), window])


def ended(plan, outcome=Outcome.CANCELLED, marks=0):
    """A report that the first job of a plan has ended on rank 0."""
    job = plan.jobs[0]
    of_groups = tuple(bytes((marks,)) * group.num_objects for group in job.groups)
    return WorkerReport(rank=0, ended=(Ended(job_id=job.job_id, outcome=outcome, marks=of_groups),))


def test_a_stale_job_neither_completes_a_newer_life_nor_advances_its_ledger(make):
    engine = make()
    held = loading(engine)
    old = engine.side.take_step()
    assert engine.side.forget("b") == held
    # The request comes again under its id while the old load is on its way, into the same blocks.
    assert load_again(engine) == frozenset()
    new = engine.side.take_step()
    assert new.cancelled == (old.jobs[0].job_id,)
    assert engine.side.report(ended(old, Outcome.DONE)).loaded == ()
    assert engine.side.num_pinned == len(held)
    progress = engine.side.report(ended(new, Outcome.DONE))
    assert (progress.loaded, progress.released) == (("b",), held)
    assert engine.side.report(ended(new, Outcome.DONE)).loaded == ()
    assert engine.side.num_stale_reports == 1


def test_a_lookup_cancels_the_load_of_the_life_before_it(make):
    engine = make()
    held = loading(engine)
    old = engine.side.take_step()
    engine.side.find_hit("b", 200, blob(PROMPT, 200))
    assert engine.side.take_step().cancelled == (old.jobs[0].job_id,)
    assert engine.side.forget("b") == held
    progress = engine.side.report(ended(old))
    assert (progress.loaded, progress.load_failed, progress.released) == ((), (), held)


def test_a_load_that_was_not_sent_is_taken_back_and_releases_its_blocks_with_the_next_report(make):
    engine = make()
    held = loading(engine)
    assert engine.side.forget("b") == held
    assert engine.side.take_step() == StepPlan()
    assert engine.side.report(WorkerReport(rank=0)).released == held
    assert engine.side.is_idle
    assert engine.side.num_pinned == 0


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_load_that_failed_without_missing_a_key_is_not_tried_again(make, outcome):
    engine = make()
    loading(engine)
    progress = engine.side.report(ended(engine.side.take_step(), outcome))
    assert (progress.loaded, progress.load_failed) == ((), ("b",))
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 0


def test_after_a_few_failed_loads_a_request_computes(make):
    store = MemoryStore()
    engine = make(store, load_tries=2)
    engine.save("a", PROMPT[:200])
    store.get = lambda keys, _targets: [GetResult.ABSENT] * len(keys)
    hits = []
    for _ in range(4):
        hit = engine.side.find_hit("b", 200, blob(PROMPT, 200))
        hits.append(hit)
        if hit:
            window = [0] * (hit // 16)
            window[-2:] = [33, 34]
            engine.side.allocated("b", [list(range(1, 1 + hit // 16)), window])
            engine.run()
    assert hits[0] == 192
    assert sum(hit > 0 for hit in hits) <= 2
    assert hits[-1] == 0


def test_a_report_of_another_form_counts_as_nothing_moved(make):
    engine = make()
    held = loading(engine)
    plan = engine.side.take_step()
    report = Ended(job_id=plan.jobs[0].job_id, outcome=Outcome.DONE)
    progress = engine.side.report(WorkerReport(rank=0, ended=(report,)))
    assert (progress.load_failed, progress.released) == (("b",), held)


def test_an_allocation_that_does_not_fit_its_load_is_not_planned_for_ever(make):
    engine = make()
    engine.save("a", PROMPT[:200])
    engine.side.find_hit("b", 200, blob(PROMPT, 200))
    with pytest.raises(TransferError):
        engine.side.allocated("b", [list(range(20, 32)), list(range(20, 32))])
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 0


def test_a_block_that_two_loads_hold_is_released_when_the_last_one_lets_go(make):
    engine = make(k=4)
    engine.save("a", PROMPT[:129])
    window = [0] * 8
    window[6:] = [33, 34]
    shared = []
    for request_id in ("b", "c"):
        engine.side.find_hit(request_id, 129, blob(PROMPT, 129), device_prefix=48)
        shared.append(engine.side.allocated(request_id, [list(range(20, 28)), window]))
    assert shared[1] == frozenset()
    plan = engine.side.take_step()
    first, second = (StepPlan(jobs=(job,)) for job in plan.jobs)
    assert engine.side.report(ended(first, Outcome.DONE)).released == frozenset()
    assert engine.side.report(ended(second, Outcome.DONE)).released == shared[0]
    assert engine.side.num_pinned == 0


def test_the_pin_budget_is_free_again_after_each_save(make):
    engine = make(pinned_blocks=4)
    tables = [list(range(1, 30)), list(range(1, 30))]
    engine.side.find_hit("a", 200, blob(PROMPT, 200), may_load=False)
    for stop in range(16, 201, 16):
        engine.side.advanced("a", stop, tables)
        engine.run()
    assert engine.side.watermark("a") == (12, 12)
    assert engine.side.counters.saves_cut == 0


def test_what_was_loaded_counts_as_stored(make):
    engine = make()
    loading(engine)
    engine.run()
    assert engine.side.watermark("b") == (12, 0)


def test_a_save_outlives_its_request_and_its_blocks_are_held_until_it_is_staged(make):
    engine = make()
    tables = [list(range(1, 30)), list(range(1, 30))]
    engine.side.find_hit("a", 64, blob(PROMPT, 64), may_load=False)
    held = engine.side.advanced("a", 64, tables)
    assert engine.side.forget("a") == held
    assert engine.run()[2] == held
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 64


def test_reset_cancels_all_jobs_fails_loads_and_saves_nothing_more(make):
    engine = make()
    held = loading(engine)
    tables = [list(range(1, 20)), list(range(1, 20))]
    engine.side.find_hit("c", 96, blob(PROMPT[::-1], 96), may_load=False)
    sent = engine.side.take_step()
    unsent = engine.side.advanced("c", 64, tables)
    engine.side.reset()
    assert engine.side.take_step() == StepPlan(cancelled=(sent.jobs[0].job_id,))
    assert engine.side.report(WorkerReport(rank=0)).released == unsent
    progress = engine.side.report(ended(sent))
    assert (progress.load_failed, progress.released) == (("b",), held)
    assert engine.side.advanced("c", 96, tables) == frozenset()
    assert engine.side.is_idle


def test_settings_decide_what_is_worth_it(make):
    engine = make(least_load_tokens=100, least_save_tokens=50)
    tables = [list(range(1, 30)), list(range(1, 30))]
    engine.side.find_hit("short", 49, blob(PROMPT, 49))
    assert engine.side.advanced("short", 49, tables) == frozenset()
    engine.save("a", PROMPT[:97])
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 0
    engine.save("c", PROMPT[:130])
    assert engine.side.find_hit("d", 200, blob(PROMPT, 200)) == 128
    assert engine.side.find_hit("e", 200, blob(PROMPT, 200), may_load=False) == 0
    assert not engine.side.allocated("e", tables)
    engine.side.find_hit("f", 200, blob(PROMPT[::-1], 200), may_save=False)
    assert engine.side.advanced("f", 200, tables) == frozenset()


def test_the_full_attention_run_beyond_the_hit_is_the_junction(make):
    engine = make(retention=0)
    engine.save("a", PROMPT[:400])
    branch = PROMPT[:200] + [7] * 200
    assert engine.side.find_hit("b", 400, blob(branch)) == 0
    engine.side.advanced("b", 400, [list(range(1, 26)), list(range(1, 26))])
    engine.run()
    third = PROMPT[:200] + [8] * 200
    assert engine.side.find_hit("c", 400, blob(third)) == 192


def test_a_store_that_fails_leaves_no_block_held(make):
    store = FaultyStore(MemoryStore())
    engine = make(store)
    store.fail_calls(100)
    engine.save("a", PROMPT[:200])
    assert engine.side.find_hit("b", 200, blob(PROMPT, 200)) == 0
    assert (engine.side.num_pinned, engine.side.is_idle) == (0, True)
    assert engine.side.watermark("a") == (0, 0)


def test_messages_of_another_version_are_refused(make):
    engine = make()
    with pytest.raises(ConfigError, match="version 3"):
        engine.side.report(WorkerReport(rank=0, version=VERSION + 1))
    with pytest.raises(ConfigError, match="version 3"):
        engine.workers[0].start(StepPlan(version=VERSION + 1))
