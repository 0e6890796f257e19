"""The driver: batches, calls in flight, deadlines, failing stores; time is a parameter."""

import threading

import numpy as np
import pytest

from hybridkv.clock import ManualClock
from hybridkv.errors import ConfigError, StoreClosedError, StoreUnavailableError
from hybridkv.keys import BlockHasher, KeyScheme, Namespace
from hybridkv.service import lookup as driver_module
from hybridkv.service.lookup import Ending, LookupDriver
from hybridkv.specs.layout_file import find_layout
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import FaultyStore, LatencyStore
from hybridkv.transfer.guard import GuardSettings

LAYOUT = find_layout("gpt-oss-120b").with_tp(2)
SCHEME = KeyScheme(Namespace(model_version="m"), LAYOUT, digest_bytes=32)
NUM_TOKENS = 8_005
BLOB = BlockHasher(hash_unit=16).hash_tokens(range(NUM_TOKENS))


class Watched:
    """A store around a store that notes the keys of each call and how many calls fly at once."""

    def __init__(self, inner):
        self.inner, self.calls, self.flying, self.most = inner, [], 0, 0
        self.lock = threading.Lock()

    def contains(self, keys):
        with self.lock:
            self.calls.append(len(keys))
            self.flying += 1
            self.most = max(self.most, self.flying)
        try:
            return self.inner.contains(keys)
        finally:
            with self.lock:
                self.flying -= 1


def stored(num_tokens=NUM_TOKENS):
    store = MemoryStore(keep_payloads=False)
    for group in LAYOUT.spec_groups:
        for rank in range(group.num_ranks):
            keys = SCHEME.keys(group.index, rank, range(num_tokens // group.object_size), BLOB)
            store.put(keys, [((0, 1),)] * len(keys))
    return store


@pytest.fixture
def drive():
    """Makes drivers and closes them."""
    drivers = []

    def make(store, **settings):
        drivers.append(LookupDriver(store, SCHEME, **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()
        driver.close()


def test_a_step_is_one_call_whatever_groups_it_asks(drive):
    store = Watched(stored())
    outcome = drive(store).lookup(NUM_TOKENS, BLOB)
    assert (outcome.result.hit, outcome.ending) == (8_000, Ending.EXACT)
    assert outcome.calls == outcome.result.steps == len(store.calls)
    assert sum(store.calls) == sum(outcome.result.keys_asked)


@pytest.mark.parametrize("max_keys", [1, 7, 100])
def test_calls_are_cut_to_equal_size_and_two_fly_at_once(drive, max_keys):
    store = Watched(stored())
    outcome = drive(store, max_keys=max_keys).lookup(NUM_TOKENS, BLOB)
    assert outcome.result.hit == 8_000
    assert max(store.calls) <= max_keys
    assert store.most <= driver_module.MAX_CALLS
    assert outcome.calls == len(store.calls) >= sum(outcome.result.keys_asked) / max_keys


def test_the_device_prefix_is_handed_on(drive):
    store = Watched(stored())
    outcome = drive(store).lookup(NUM_TOKENS, BLOB, device_prefix=7_936)
    assert outcome.result.hit == 8_000
    assert sum(store.calls) == 2 * (4 + 4)
    assert drive(store).lookup(NUM_TOKENS, BLOB, device_prefix=8_000).calls == 0


def test_at_the_deadline_the_best_proven_boundary_is_the_hit():
    clock = ManualClock()
    layout = find_layout("llama-3.1-8b")
    scheme = KeyScheme(Namespace(model_version="m"), layout, digest_bytes=32)
    inner = MemoryStore(keep_payloads=False)
    keys = scheme.keys(0, 0, range(500), BLOB)
    inner.put(keys, [((0, 1),)] * len(keys))
    store = LatencyStore(inner, per_call_s=1.0, clock=clock)
    driver = LookupDriver(store, scheme, max_keys=50, clock=clock)
    outcome = driver.lookup(NUM_TOKENS, BLOB, timeout_s=6.5)
    driver.close()
    assert outcome.ending is Ending.DEADLINE
    assert 0 < outcome.result.hit < 8_000
    assert outcome.result.hit % 16 == 0
    in_time = LookupDriver(store, scheme, max_keys=50, clock=clock)
    assert in_time.lookup(NUM_TOKENS, BLOB, timeout_s=100).ending is Ending.EXACT
    in_time.close()


def test_a_deadline_that_has_passed_is_a_miss_without_a_call(drive):
    store = Watched(stored())
    outcome = drive(store, clock=ManualClock()).lookup(NUM_TOKENS, BLOB, timeout_s=0)
    assert (outcome.result.hit, outcome.ending, store.calls) == (0, Ending.DEADLINE, [])
    assert outcome.calls == 0


def test_a_store_that_hangs_is_left_behind_at_the_deadline(drive):
    hang = threading.Event()

    class Hanging:
        def contains(self, keys):
            hang.wait()
            return [True] * len(keys)

    driver = drive(Hanging())
    try:
        outcome = driver.lookup(NUM_TOKENS, BLOB, device_prefix=16, timeout_s=0.05)
        assert (outcome.result.hit, outcome.ending) == (16, Ending.DEADLINE)
        # The two threads still hang, so the next lookup ends at its deadline too.
        again = driver.lookup(NUM_TOKENS, BLOB, timeout_s=0.05)
        assert (again.result.hit, again.ending) == (0, Ending.DEADLINE)
    finally:
        hang.set()


@pytest.mark.parametrize("max_keys", [10, 4096])
def test_a_store_that_fails_is_a_miss_and_the_next_lookup_works(drive, caplog, max_keys):
    store = FaultyStore(stored())
    store.fail_calls(2)
    driver = drive(store, max_keys=max_keys)
    outcome = driver.lookup(NUM_TOKENS, BLOB)
    assert (outcome.result.hit, outcome.ending) == (0, Ending.FAILED)
    assert "a lookup ended early" in caplog.text
    store.heal()
    assert driver.lookup(NUM_TOKENS, BLOB).result.hit == 8_000
    metrics = driver.metrics()
    assert metrics.endings == {Ending.FAILED: 1, Ending.EXACT: 1}
    assert metrics.keys_asked >= metrics.keys_useful > 0
    assert metrics.calls > 1


def test_a_closed_driver_is_refused(drive):
    driver = drive(stored())
    driver.close()
    with pytest.raises(StoreClosedError):
        driver.lookup(NUM_TOKENS, BLOB)


@pytest.mark.parametrize("answers", [[True], [1] * 3, [2] * 25])
def test_a_store_that_answers_nonsense_is_a_miss(drive, answers):
    class Confused:
        def contains(self, _keys):
            return answers

    outcome = drive(Confused()).lookup(NUM_TOKENS, BLOB)
    assert (outcome.result.hit, outcome.ending) == (0, Ending.FAILED)


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, ZeroDivisionError])
def test_a_store_with_a_bug_is_a_miss(drive, caplog, error):
    class Broken:
        def contains(self, _keys):
            raise error("bug")

    outcome = drive(Broken()).lookup(NUM_TOKENS, BLOB)
    assert (outcome.result.hit, outcome.ending) == (0, Ending.FAILED)
    assert error.__name__ in caplog.text
    again = drive(Broken(), max_keys=10).lookup(NUM_TOKENS, BLOB, timeout_s=10, absent={"x"})
    assert again.ending is Ending.FAILED


def test_a_store_that_would_end_a_lookup_thread_is_a_miss_and_the_thread_lives_on(drive, caplog):
    class Leaving(MemoryStore):
        def contains(self, _keys):
            raise SystemExit

    store = Watched(Leaving())
    driver = drive(store)
    for _ in range(driver_module.MAX_CALLS):
        outcome = driver.lookup(NUM_TOKENS, BLOB, timeout_s=30)
        assert (outcome.ending, outcome.result.hit) == (Ending.FAILED, 0)
    assert "SystemExit" in caplog.text
    store.inner = stored()
    assert driver.lookup(NUM_TOKENS, BLOB, timeout_s=30).ending is Ending.EXACT


def test_after_failures_in_a_row_the_store_is_spared_for_a_while(drive):
    store, clock = FaultyStore(stored()), ManualClock()
    store.fail_calls(100)
    watched = Watched(store)
    driver = drive(watched, clock=clock, breaker=GuardSettings(failures_to_open=2, open_s=5))
    for _ in range(6):
        assert driver.lookup(NUM_TOKENS, BLOB).ending is Ending.FAILED
    assert len(watched.calls) == 2
    store.heal()
    assert driver.lookup(NUM_TOKENS, BLOB).result.hit == 0
    clock.sleep(6)
    assert driver.lookup(NUM_TOKENS, BLOB).result.hit == 8_000
    assert driver.lookup(NUM_TOKENS, BLOB).result.hit == 8_000


def test_calls_hold_at_least_one_key(drive):
    with pytest.raises(ConfigError, match="max_keys is 0"):
        drive(stored(), max_keys=0)


def test_what_was_proven_before_the_failure_counts():
    class FailsLate(Watched):
        def contains(self, keys):
            if len(self.calls) == 13:
                raise StoreUnavailableError("gone")
            return super().contains(keys)

    layout = find_layout("llama-3.1-8b")
    scheme = KeyScheme(Namespace(model_version="m"), layout, digest_bytes=32)
    inner = MemoryStore(keep_payloads=False)
    keys = scheme.keys(0, 0, range(500), BLOB)
    inner.put(keys, [((0, 1),)] * len(keys))
    driver = LookupDriver(FailsLate(inner), scheme, max_keys=20)
    outcome = driver.lookup(NUM_TOKENS, BLOB)
    driver.close()
    assert outcome.ending is Ending.FAILED
    assert 0 < outcome.result.hit < 8_000


def test_lookups_of_several_threads_share_a_driver(drive):
    driver = drive(stored(4_000), max_keys=64)
    hits = np.zeros(8, dtype=int)

    def look(idx):
        hits[idx] = driver.lookup(NUM_TOKENS, BLOB).result.hit

    threads = [threading.Thread(target=look, args=(idx,)) for idx in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits.tolist() == [4_000] * 8
