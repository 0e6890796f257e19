"""Saves that are planned again: what exceeds the pin budget, what failed, what the store lost below p0."""

import threading

import pytest

from hybridkv.clock import ManualClock
from hybridkv.errors import ConfigError
from hybridkv.service.messages import StepPlan
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.stores.base import PutResult
from hybridkv.stores.memory import MemoryStore
from tests.service.test_sides import PROMPT, Engine, blob, load_again

TABLES = [list(range(1, 30)), list(range(1, 30))]


@pytest.fixture
def make():
    engines = []

    def start(store=None, **settings):
        engines.append(Engine(MemoryStore() if store is None else store, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def finish(engine, request_id="a", num_tokens=128, most=60):
    """Run steps until the request wants no save; return in how many of them something was saved."""
    saves = steps = 0
    while engine.side.wants_save(request_id):
        assert steps < most, "it wants to be saved for ever"
        saves += bool(engine.side.advanced(request_id, num_tokens + steps, TABLES))
        assert engine.side.num_pinned <= engine.side._settings.pinned_blocks
        engine.run()
        steps += 1
    assert engine.side.take_step() == StepPlan()
    return saves


def test_what_does_not_fit_the_pin_budget_is_saved_with_later_steps(make):
    engine = make(pinned_blocks=7)
    engine.side.find_hit("a", 128, blob(PROMPT, 128), may_load=False)
    # The leading tokens go first: three objects of each group and one more.
    assert len(engine.side.advanced("a", 128, TABLES)) == 7
    assert engine.side.counters.saves_cut == 1
    assert not engine.side.wants_save("a"), "nothing can be better before a report"
    assert engine.side.advanced("a", 129, TABLES) == frozenset()
    engine.run()
    assert engine.side.watermark("a") == (4, 3)
    assert finish(engine) == 2
    assert engine.side.watermark("a") == (8, 8)


def test_loads_use_up_the_pin_budget_and_are_not_held_back(make):
    engine = make(pinned_blocks=7)
    engine.side.find_hit("s", 200, blob(PROMPT, 200), may_load=False)
    finish(engine, "s", 200)
    engine.side.forget("s")
    assert len(load_again(engine)) == 14
    other = blob(PROMPT[::-1], 64)
    engine.side.find_hit("a", 64, other, may_load=False)
    assert engine.side.advanced("a", 64, TABLES) == frozenset()
    engine.run()
    assert finish(engine, "a", 64) > 0
    assert engine.side.watermark("a") == (4, 4)


class Full(MemoryStore):
    """Refuses the keys that ``refuses`` is true of."""

    num_puts = 0

    def refuses(self, _key):
        return True

    def put(self, keys, sources, _hints=None):
        self.num_puts += len(keys)
        given = [idx for idx, key in enumerate(keys) if not self.refuses(key)]
        results = [PutResult.REFUSED] * len(keys)
        stored = super().put([keys[idx] for idx in given], [sources[idx] for idx in given])
        for idx, result in zip(given, stored, strict=True):
            results[idx] = result
        return results


@pytest.mark.parametrize("pinned_blocks", [7, 1000])
@pytest.mark.parametrize("steps", [[128], range(16, 129, 16)])
def test_a_failed_object_is_tried_a_few_times_in_a_life(make, pinned_blocks, steps):
    store = Full()
    engine = make(store, pinned_blocks=pinned_blocks, save_tries=2)
    engine.side.find_hit("a", 128, blob(PROMPT, 128), may_load=False)
    for stop in steps:
        engine.side.advanced("a", stop, TABLES)
        engine.run()
    finish(engine)
    # Sixteen objects, each in two jobs, each put four times there.
    assert store.num_puts == 16 * 2 * 4
    assert engine.side.watermark("a") == (0, 0)


def test_a_failed_save_is_made_up_for_once_the_store_has_room(make):
    store = Full()
    engine = make(store)
    engine.side.find_hit("a", 64, blob(PROMPT, 64), may_load=False)
    engine.side.advanced("a", 64, TABLES)
    engine.run()
    store.refuses = lambda _key: False
    assert finish(engine, "a", 65) == 1
    assert engine.side.watermark("a") == (4, 4)
    assert not engine.side.wants_save("nobody")


def test_a_bad_object_does_not_keep_the_others_from_being_stored(make):
    store = Full()
    engine = make(store, pinned_blocks=2)
    bad = engine.side._scheme.keys(0, 0, range(1), blob(PROMPT, 128))
    store.refuses = bad.__contains__
    engine.side.find_hit("a", 128, blob(PROMPT, 128), may_load=False)
    finish(engine)
    assert store.stats().objects == 15


def test_a_pin_budget_without_room_for_two_objects_is_refused(make):
    engine = make(k=4)
    scheme = engine.side._scheme
    with pytest.raises(ConfigError, match="one object of small has up to 4 blocks; give at least 8"):
        SchedulerSide(engine.driver, scheme, SchedulerSettings(pinned_blocks=7))
    for wrong in ({"save_tries": 0}, {"save_tries": 256}, {"load_tries": 0}):
        with pytest.raises(ConfigError, match="give 1 to 255"):
            SchedulerSide(engine.driver, scheme, SchedulerSettings(**wrong))


class Asked(MemoryStore):
    """Notes the keys of each question and of each put."""

    def __init__(self):
        super().__init__()
        self.asked, self.put_keys, self.lock = [], [], threading.Lock()

    def contains(self, keys):
        with self.lock:
            self.asked.append(list(keys))
        return super().contains(keys)

    def put(self, keys, sources, hints=None):
        with self.lock:
            self.put_keys += keys
        return super().put(keys, sources, hints)


def below_the_device_prefix(engine, request_id, run=True):
    """Start a request whose first 160 tokens are on the device: their windows' tail, and all else."""
    window = [0] * 13
    window[8:] = [9, 10, 11, 12, 13]
    hit = engine.side.find_hit(request_id, 205, blob(PROMPT, 205), device_prefix=160, may_load=False)
    assert hit == 160
    held = engine.side.advanced(request_id, 205, [list(range(1, 14)), window])
    return engine.run() if run else held


@pytest.mark.parametrize("tp", [1, 2])
def test_what_the_store_lost_below_the_devices_prefix_is_put_back(make, tp):
    store = Asked()
    engine = make(store, tp=tp, known_s=0.0)
    engine.save("a", PROMPT[:205])
    keys = engine.side._scheme.keys(0, 0, range(12), blob(PROMPT, 205))
    before = sorted(info.key for info in store.list())
    store.discard([keys[1], keys[7]])
    store.asked.clear()
    store.put_keys.clear()
    below_the_device_prefix(engine, "b")
    # Ten objects of full attention below token 160, and two of the window's that the device still holds.
    assert sum(map(len, store.asked)) == 12 * tp
    assert {key for key in store.put_keys if key in keys[:10]} == {keys[1], keys[7]}
    assert sorted(info.key for info in store.list()) == before
    assert engine.side.watermark("b")[0] == 12
    for device in engine.devices:
        device.fill(seed=99)
    assert engine.side.find_hit("c", 205, blob(PROMPT, 205)) == 192


def test_the_store_is_asked_once_about_what_this_process_does_not_know(make):
    store = Asked()
    engine = make(store)
    engine.save("a", PROMPT[:205])
    store.asked.clear()
    below_the_device_prefix(engine, "b")
    assert store.asked == [], "its own saves are known"
    engine.side.reset()
    below_the_device_prefix(engine, "c")
    assert sum(map(len, store.asked)) == 12
    below_the_device_prefix(engine, "d")
    assert sum(map(len, store.asked)) == 12, "and so is what it has asked"


def test_known_objects_are_trusted_for_a_while_and_a_failed_load_ends_it(make):
    store, clock = Asked(), ManualClock()
    engine = make(store, known_s=60.0, clock=clock)
    engine.save("a", PROMPT[:205])
    store.asked.clear()
    store.discard(engine.side._scheme.keys(0, 0, range(3, 4), blob(PROMPT, 205)))
    store.contains = lambda keys: [True] * len(keys)
    load_again(engine, "b")
    engine.run()
    del store.contains
    below_the_device_prefix(engine, "c")
    assert list(map(len, store.asked)) == [1], "only what the load has missed"
    store.asked.clear()
    clock.sleep(61)
    below_the_device_prefix(engine, "d")
    assert sum(map(len, store.asked)) >= 10


def test_a_repair_that_cannot_ask_is_tried_again_in_the_same_life(make):
    store = Asked()
    engine = make(store)
    contains, store.contains = store.contains, None  # calling it raises
    below_the_device_prefix(engine, "a")
    assert engine.side.watermark("a")[0] == 0
    assert engine.side.num_pinned == 0
    store.contains = contains
    finish(engine, "a", 206)
    assert engine.side.watermark("a")[0] == 12


def test_a_repair_takes_half_of_what_is_free_and_goes_on_with_later_steps(make):
    store = Asked()
    engine = make(store, pinned_blocks=16)
    held = below_the_device_prefix(engine, "a", run=False)
    # The step's own save first: three objects of each group less one null block; then half of the rest.
    assert len(held) <= 6 + 5
    other = blob(PROMPT[::-1], 32)
    engine.side.find_hit("other", 32, other, may_load=False)
    assert len(engine.side.advanced("other", 32, [[21, 22], [21, 22]])) == 4, "there is room for others"
    engine.run()
    finish(engine, "a", 206)
    assert engine.side.watermark("a")[0] == 12


def test_after_a_reset_what_had_ended_before_its_report_counts_as_not_done(make):
    engine = make()
    engine.save("a", PROMPT[:200])
    engine.side.forget("a")
    held = load_again(engine)
    engine.side.find_hit("c", 64, blob(PROMPT[::-1], 64), may_load=False)
    held |= engine.side.advanced("c", 64, TABLES)
    engine.workers[0].start(engine.side.take_step())
    assert engine.workers[0].drain(30)
    engine.side.reset()
    progress = engine.side.report(engine.workers[0].poll())
    assert (progress.loaded, progress.load_failed, progress.stored) == ((), ("b",), ())
    assert progress.released == held
    assert len(engine.side._known) == 0
