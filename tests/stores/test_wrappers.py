import pytest

from hybridkv.clock import ManualClock, MonotonicClock
from hybridkv.errors import ConfigError, StoreError, StoreUnavailableError
from hybridkv.stores.base import GetResult, ListsObjects, PutHint, PutResult, ReportsStats
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import (
    Fault,
    FaultyStore,
    LatencyStore,
    MeteredStore,
    OperationCounts,
    StoreWrapper,
)
from hybridkv.testing.stores import StoreTests, Workbench, run_store_machine

STORED, OK = PutResult.STORED, GetResult.OK


class TestStoreWrapper(StoreTests):
    def make_store(self, capacity_bytes):
        return StoreWrapper(MemoryStore(capacity_bytes))


class TestMeteredStore(StoreTests):
    def make_store(self, capacity_bytes):
        return MeteredStore(MemoryStore(capacity_bytes))


class TestLatencyStore(StoreTests):
    def make_store(self, capacity_bytes):
        return LatencyStore(MemoryStore(capacity_bytes), per_call_s=1.0, per_key_s=1.0, clock=ManualClock())


class TestFaultyStoreWithoutFaults(StoreTests):
    def make_store(self, capacity_bytes):
        return FaultyStore(MemoryStore(capacity_bytes))


def sized(*sizes: int) -> list[list[tuple[int, int]]]:
    return [[(0, size)] for size in sizes]


def metadata_store(capacity_bytes: int | None = None) -> MemoryStore:
    return MemoryStore(capacity_bytes, keep_payloads=False)


class BareStore(StoreWrapper):
    def __init__(self, inner):
        super().__init__(inner)
        del self.list, self.stats


class TestStoreWithoutCapabilities(StoreTests):
    def make_store(self, capacity_bytes):
        return BareStore(MemoryStore(capacity_bytes))


def test_the_machine_drives_a_store_without_capabilities():
    run_store_machine(lambda capacity_bytes: BareStore(MemoryStore(capacity_bytes)), max_examples=10)


def test_a_wrapper_has_the_capabilities_of_the_inner_store_and_no_others():
    rich, bare = StoreWrapper(MemoryStore()), StoreWrapper(BareStore(MemoryStore()))
    assert isinstance(rich, ListsObjects)
    assert isinstance(rich, ReportsStats)
    assert not isinstance(bare, ListsObjects)
    assert not isinstance(bare, ReportsStats)


class TestMeteredCounts:
    def test_each_operation_counts_its_calls_keys_bytes_and_results(self):
        store = MeteredStore(metadata_store(10), ManualClock())
        store.put(["a", "b", "a"], sized(3, 20, 3))
        store.put(["c"], sized(4))
        store.get(["a", "b", "c"], sized(3, 20, 5))
        store.contains(["a", "b", "c"])
        store.discard(["a"])
        put, get = store.counts("put"), store.counts("get")
        assert (put.calls, put.num_keys, put.num_bytes, put.errors) == (2, 4, 7, 0)
        assert put.results == {"stored": 2, "refused": 1, "already": 1}
        assert (get.calls, get.num_keys, get.num_bytes) == (1, 3, 3)
        assert get.results == {"ok": 1, "absent": 1, "corrupt": 1}
        assert store.counts("contains").results == {"present": 2, "absent": 1}
        assert store.counts("discard") == OperationCounts(calls=1, num_keys=1)

    def test_the_seconds_of_the_inner_store_are_measured(self):
        clock = ManualClock()
        store = MeteredStore(
            LatencyStore(metadata_store(), per_call_s=2.0, per_key_s=0.5, clock=clock), clock
        )
        store.contains(["a", "b"])
        store.contains([])
        assert store.counts("contains").seconds == 5.0
        assert store.counts("get").seconds == 0.0

    def test_a_call_that_raises_is_counted_as_an_error_and_passed_on(self):
        store = MeteredStore(metadata_store())
        with pytest.raises(StoreError):
            store.put(["a", "b"], sized(1))
        assert (store.counts("put").calls, store.counts("put").errors, store.counts("put").num_keys) == (
            1,
            1,
            2,
        )
        assert store.counts("put").results == {}

    def test_counts_do_not_change_after_they_were_taken(self):
        store = MeteredStore(metadata_store())
        before = store.counts("contains")
        store.contains(["a"])
        assert before == OperationCounts()


class TestLatency:
    def test_every_batch_call_costs_its_call_and_its_keys(self):
        clock = ManualClock()
        store = LatencyStore(metadata_store(), per_call_s=1.0, per_key_s=0.25, clock=clock)
        calls = [
            lambda: store.put(["a", "b"], sized(1, 1)),
            lambda: store.get(["a", "b"], sized(1, 1)),
            lambda: store.contains(["a", "b"]),
            lambda: store.discard(["a", "b"]),
        ]
        for num_calls, call in enumerate(calls, start=1):
            call()
            assert clock.now_s() == 1.5 * num_calls
        store.close()
        assert clock.now_s() == 6.0

    def test_the_machines_clock_is_the_default(self):
        assert isinstance(LatencyStore(metadata_store())._clock, MonotonicClock)

    @pytest.mark.parametrize("delays", [{"per_call_s": -1.0}, {"per_key_s": -0.1}])
    def test_a_negative_delay_is_a_config_error(self, delays):
        with pytest.raises(ConfigError, match="negative"):
            LatencyStore(metadata_store(), **delays)


class TestFaults:
    def test_calls_fail_as_often_as_told_and_do_nothing(self):
        store = FaultyStore(metadata_store())
        calls = [
            lambda: store.put(["a"], sized(1)),
            lambda: store.get(["a"], sized(1)),
            lambda: store.contains(["a"]),
            lambda: store.discard(["a"]),
        ]
        store.fail_calls(len(calls))
        for call in calls:
            with pytest.raises(StoreUnavailableError):
                call()
        assert store.contains(["a"]) == [False]

    @pytest.mark.parametrize(
        ("fault", "result"), [(Fault.FAILED, PutResult.FAILED), (Fault.REFUSED, PutResult.REFUSED)]
    )
    def test_a_put_fault_strikes_once_and_stores_nothing(self, fault, result):
        store = FaultyStore(metadata_store())
        store.inject("b", fault)
        hints = [PutHint(parent=None, prefix=idx, spec_group=0, kept_boundary=False) for idx in range(3)]
        assert store.put(["a", "b", "c"], sized(1, 1, 1), hints) == [STORED, result, STORED]
        assert store.contains(["a", "b", "c"]) == [True, False, True]
        assert store.put(["b"], sized(1)) == [STORED]

    @pytest.mark.parametrize(
        ("fault", "result"),
        [
            (Fault.FAILED, GetResult.FAILED),
            (Fault.ABSENT, GetResult.ABSENT),
            (Fault.CORRUPT, GetResult.CORRUPT),
        ],
    )
    def test_a_get_fault_strikes_once_and_touches_no_target(self, fault, result):
        bench = Workbench(FaultyStore(MemoryStore()), 256)
        bench.put("a", b"data")
        bench.store.inject("a", fault)
        got, content = bench.get("a", 4)
        assert (got, content == b"data") == (result, False)
        assert bench.get("a", 4) == (OK, b"data")

    def test_a_flipped_get_is_ok_with_one_wrong_byte_and_leaves_the_object_right(self):
        bench = Workbench(FaultyStore(MemoryStore()), 256)
        bench.put("a", b"\x0fata")
        bench.store.inject("a", Fault.FLIPPED)
        assert bench.get("a", 4, 2) == (OK, b"\xf0ata")
        assert bench.get("a", 4) == (OK, b"\x0fata")

    def test_a_flipped_get_of_an_absent_object_is_absent(self):
        bench = Workbench(FaultyStore(MemoryStore()), 256)
        bench.store.inject("a", Fault.FLIPPED)
        assert bench.get("a", 4)[0] is GetResult.ABSENT

    def test_a_script_runs_in_its_order_each_fault_where_it_applies(self):
        store = FaultyStore(metadata_store())
        store.inject("a", Fault.ABSENT, Fault.REFUSED)
        store.inject("a", Fault.CORRUPT)
        assert [store.put(["a"], sized(1))[0] for _ in range(2)] == [PutResult.REFUSED, STORED]
        results = [store.get(["a"], sized(1))[0] for _ in range(3)]
        assert results == [GetResult.ABSENT, GetResult.CORRUPT, OK]

    def test_equal_seeds_give_equal_faults(self):
        def results(seed: int) -> list[PutResult]:
            store = FaultyStore(metadata_store(), rates={Fault.FAILED: 0.2, Fault.REFUSED: 0.2}, seed=seed)
            return store.put([f"{idx}" for idx in range(200)], sized(*[1] * 200))

        assert results(1) == results(1) != results(2)
        assert set(results(1)) == {STORED, PutResult.FAILED, PutResult.REFUSED}

    def test_a_rate_of_one_strikes_always_until_the_store_heals(self):
        store = FaultyStore(metadata_store(), rates={Fault.UNAVAILABLE: 1.0, Fault.FAILED: 1.0})
        store.inject("a", Fault.REFUSED)
        store.fail_calls(5)
        with pytest.raises(StoreUnavailableError):
            store.put(["a"], sized(1))
        store.fail_calls(0)
        with pytest.raises(StoreUnavailableError):
            store.put(["a"], sized(1))
        store.heal()
        assert store.put(["a"], sized(1)) == [STORED]

    @pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
    def test_a_rate_that_is_no_probability_is_a_config_error(self, rate):
        with pytest.raises(ConfigError, match="absent"):
            FaultyStore(metadata_store(), rates={Fault.ABSENT: rate})

    def test_a_key_cannot_be_unavailable(self):
        with pytest.raises(ConfigError, match="fail_calls"):
            FaultyStore(metadata_store()).inject("a", Fault.UNAVAILABLE)
