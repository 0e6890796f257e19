"""Hits that are found while the engine goes on, fresh namespaces, and output that is saved, too."""

import threading
import time

import pytest

from hybridkv.clock import ManualClock
from hybridkv.errors import TransferError
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import StoreWrapper
from tests.service.test_sides import PROMPT, Engine, blob

TABLES = [list(range(1, 30)), list(range(1, 30))]
TO_LOAD = [list(range(1, 13)), [0] * 10 + [11, 12]]
"""Blocks that an engine allocates for a hit of 192 tokens."""


class GatedStore(StoreWrapper):
    """Answers ``contains`` only while the gate is open, and counts."""

    def __init__(self):
        super().__init__(MemoryStore())
        self.gate, self.calls = threading.Event(), 0
        self.gate.set()

    def contains(self, keys):
        self.calls += 1
        assert self.gate.wait(60)
        return self._inner.contains(keys)


@pytest.fixture
def store():
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def make(store):
    engines = []

    def start(**settings):
        engines.append(Engine(store, **settings))
        return engines[-1]

    yield start
    store.gate.set()
    for engine in engines:
        engine.close()


def ask(engine, request_id="b", num_tokens=200, **how):
    return engine.side.ask(request_id, num_tokens, lambda: blob(PROMPT, num_tokens), **how)


def answer(engine, *args, **how):
    end_s = time.monotonic() + 30
    while (hit := ask(engine, *args, **how)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return hit


def test_the_scheduler_goes_on_while_the_store_is_asked_and_asks_once(make, store):
    engine = make()
    engine.save("a", PROMPT[:205])
    before = store.calls
    store.gate.clear()
    assert [ask(engine) for _ in range(50)] == [None] * 50
    store.gate.set()
    assert answer(engine) == 192
    calls = store.calls - before
    assert [ask(engine) for _ in range(50)] == [192] * 50
    assert store.calls - before == calls <= 2


def test_block_hashes_are_made_once(make):
    engine, made = make(), []

    def hashes():
        made.append(1)
        return blob(PROMPT, 200)

    for _ in range(20):
        engine.side.ask("b", 200, hashes)
    assert len(made) == 1


def test_a_lookup_past_its_deadline_is_a_miss_even_while_the_store_hangs(make, store):
    clock = ManualClock()
    engine = make(clock=clock, lookup_timeout_s=2.0)
    engine.save("a", PROMPT[:205])
    store.gate.clear()
    assert ask(engine) is None
    clock.sleep(2.5)
    assert ask(engine) == 0
    assert engine.side.counters.lookups_late == 1


def test_an_old_answer_is_asked_for_again(make):
    clock = ManualClock()
    engine = make(clock=clock, answer_s=5.0)
    assert answer(engine) == 0
    engine.save("a", PROMPT[:205])
    assert ask(engine) == 0
    clock.sleep(6.0)
    assert answer(engine) == 192


def test_a_larger_device_prefix_takes_the_answer_and_a_smaller_one_asks_again(make, store):
    engine = make()
    engine.save("a", PROMPT[:205])
    assert answer(engine, device_prefix=64) == 192
    calls = store.calls
    assert ask(engine, device_prefix=96) == 192
    assert engine.side.allocated("b", TO_LOAD, num_loaded=96)
    engine.run()
    assert store.calls == calls
    engine.side.forget("b")
    assert answer(engine, device_prefix=64) == 192
    calls = store.calls
    assert answer(engine, device_prefix=0) == 192
    assert store.calls > calls


def test_a_device_that_has_caught_up_loads_nothing(make):
    engine = make()
    engine.save("a", PROMPT[:205])
    assert answer(engine) == 192
    assert ask(engine, device_prefix=192) == 192
    engine.side.started("b")
    assert engine.side.take_step().jobs == ()


def test_a_request_that_began_and_comes_again_is_asked_for_anew(make):
    engine = make()
    assert answer(engine) == 0
    engine.side.started("b")
    engine.save("a", PROMPT[:205])
    assert answer(engine) == 192


def test_a_hit_that_the_engine_does_not_take_is_computed_and_saved(make):
    """As with several connectors, of which another one was chosen."""
    engine = make(retention=0)
    engine.save("a", PROMPT[:128])
    assert answer(engine, "b", 205) > 0
    engine.side.started("b")
    engine.side.advanced("b", 205, TABLES)
    engine.run()
    assert engine.side.watermark("b")[0] == 12


def test_a_request_that_is_forgotten_while_the_store_is_asked_leaves_nothing(make, store):
    engine = make()
    store.gate.clear()
    assert ask(engine) is None
    engine.side.forget("b")
    store.gate.set()
    assert not engine.side.wants_save("b")
    assert engine.side.is_idle


def test_a_load_of_another_length_than_was_found_is_refused(make):
    engine = make()
    engine.save("a", PROMPT[:205])
    assert answer(engine) == 192
    with pytest.raises(TransferError, match="takes 64 tokens for loaded"):
        engine.side.allocated("b", TABLES, num_loaded=64)
    assert engine.side.take_step().jobs == ()


def test_a_fresh_namespace_finds_nothing_of_the_old_one_and_keeps_its_own(make, store):
    engine = make()
    engine.save("a", PROMPT[:205])
    assert answer(engine) == 192
    engine.side.allocated("b", TO_LOAD)
    scheme = engine.side._scheme.at_epoch(7)
    assert engine.side.reset(scheme) == {"b"}
    engine.run()
    assert answer(engine, "b") == 0
    engine.save("c", PROMPT[:205])
    assert answer(engine, "d") == 192
    fingerprints = {info.key.split("/")[1] for info in store._inner.list()}
    assert len(fingerprints) == 2


def test_a_load_that_a_worker_had_ended_before_a_reset_fails(make):
    engine = make()
    engine.save("a", PROMPT[:205])
    assert answer(engine) == 192
    engine.side.allocated("b", TO_LOAD)
    plan = engine.side.take_step()
    engine.workers[0].start(plan)
    assert engine.workers[0].drain(30)
    assert engine.side.reset() == {"b"}
    assert engine.side.report(engine.workers[0].poll()).loaded == ()
    assert engine.side.is_idle


def test_an_answer_from_before_a_reset_is_not_taken(make, store):
    engine = make()
    engine.save("a", PROMPT[:205])
    store.gate.clear()
    assert ask(engine) is None
    engine.side.reset(engine.side._scheme.at_epoch(7))
    store.gate.set()
    assert answer(engine) == 0


# ---- output


def grow(engine, request_id, stop, tables=TABLES):
    engine.side.grown(request_id, stop // 16 * 16, lambda: blob(PROMPT, stop))
    engine.side.advanced(request_id, stop, tables)
    engine.run()


def test_output_is_saved_as_it_comes(make):
    engine = make()
    engine.save("a", PROMPT[:100], tables=TABLES)
    for stop in range(101, 205):
        grow(engine, "a", stop)
    engine.side.forget("a")
    assert answer(engine, "b", 300) == 192


def test_without_growth_output_is_not_saved(make):
    engine = make()
    engine.save("a", PROMPT[:100])
    engine.side.advanced("a", 204, TABLES)
    assert engine.side.take_step().jobs == ()


def test_the_end_of_the_output_is_kept_whatever_the_retention(make):
    engine = make(retention=0)
    engine.save("a", PROMPT[:100], tables=TABLES)
    for stop in range(101, 205):
        grow(engine, "a", stop)
    before = answer(engine, "b", 300)
    windows = TABLES[1].copy()
    windows[:9] = [0] * 9  # recycled meanwhile
    held = engine.side.finished("a", 204, [TABLES[0], windows])
    assert held
    assert engine.run()[2] == held
    assert before < answer(engine, "c", 300) == 192


def test_the_end_of_a_request_that_may_not_be_saved_is_not(make):
    engine = make()
    engine.side.find_hit("a", 100, blob(PROMPT, 100), may_load=False, may_save=False)
    engine.side.grown("a", 192, lambda: blob(PROMPT, 192))
    assert engine.side.finished("a", 204, TABLES) == frozenset()
    assert engine.side.finished("unknown", 204, TABLES) == frozenset()
