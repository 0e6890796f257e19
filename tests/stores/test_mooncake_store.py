"""The store on Mooncake over a stand-in of its library; tests/mooncake drives the real one."""

import os
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from tests.stores.fake_mooncake import FAILED, NO_ANSWER, FakeClient, FakeCluster, FakeMaster

from hybridkv.clock import ManualClock
from hybridkv.errors import StoreClosedError, StoreError, StoreUnavailableError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.mooncake import connection as connection_module
from hybridkv.stores.mooncake import store as store_module
from hybridkv.stores.mooncake.settings import MooncakeSettings
from hybridkv.stores.mooncake.store import MooncakeStore, open_mooncake
from hybridkv.stores.registry import parse_store_uri
from hybridkv.testing.stores import StoreTests, Workbench, payload, run_store_machine


@pytest.fixture(scope="module")
def listener():
    """What the probe of the master finds."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def cluster(monkeypatch):
    fake = FakeCluster()
    fake.master = FakeMaster(fake)
    for module in (store_module, connection_module):
        monkeypatch.setattr(module, "Master", lambda _address: fake.master)
    return fake


@pytest.fixture
def opened(cluster, listener):
    """Opens stores and closes them."""
    stores = []

    def open_one(**changes):
        settings = MooncakeSettings(
            **{"master": listener, "http": listener, "staging_bytes": 16 << 20, **changes}
        )
        stores.append(MooncakeStore(settings, library=cluster.library, clock=ManualClock()))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class TestContract(StoreTests):
    capacity_objects = None
    is_lru = False
    changes: dict = {}  # noqa: RUF012 - overridden, never changed

    @pytest.fixture(autouse=True)
    def _open(self, cluster, opened):
        self.cluster, self.opened = cluster, opened

    def make_store(self, _capacity_bytes):
        self.cluster.values.clear()
        return self.opened(**self.changes)


class TestContractInPlace(TestContract):
    changes = {"pack_bytes": 1}  # noqa: RUF012 - never changed


class TestContractWithoutChecksums(TestContract):
    changes = {"is_checksummed": False}  # noqa: RUF012 - never changed


def test_it_behaves_like_a_dict(cluster, opened):
    def make(_):
        cluster.values.clear()
        return opened()

    run_store_machine(make, max_examples=10)


def stored(store, key="a", data=b"x" * 1000):
    bench = Workbench(store, 1 << 20)
    assert bench.put(key, data) is PutResult.STORED
    return bench


def test_a_negative_answer_is_no_presence(cluster, opened):
    store = opened()
    stored(store)
    cluster.answer = NO_ANSWER
    with pytest.raises(StoreUnavailableError, match="does not answer: -900"):
        store.contains(["a"])
    cluster.answer = -1
    assert store.contains(["a"]) == [False]


def test_answers_of_another_number_are_refused(cluster, opened):
    store = opened()
    cluster.answer = lambda _names: []
    with pytest.raises(StoreUnavailableError, match="0 answers for 1 names"):
        store.contains(["a"])


def test_an_object_that_cannot_be_removed_is_an_error(cluster, opened):
    store = opened()
    cluster.answer = -706
    with pytest.raises(StoreUnavailableError, match="could not remove 1 values: -706"):
        store.discard(["a"])


def test_a_put_that_finds_no_room_is_tried_again_and_then_refused(cluster, opened):
    store = opened()
    cluster.num_full = 3
    stored(store)
    cluster.num_full = 100
    assert Workbench(store, 100).put("b", b"y") is PutResult.REFUSED


def test_other_failures_of_a_key_are_its_result(cluster, opened):
    store = opened()
    bench = stored(store)
    exists = [0]
    cluster.answer = lambda names: exists * len(names)
    exists[0] = -714
    assert bench.put("b", b"y") is PutResult.FAILED
    assert bench.get("a", 1000)[0] is GetResult.FAILED


def test_bytes_that_change_on_the_way_are_fetched_again(cluster, opened):
    store = opened()
    bench = stored(store)
    name, value = next(iter(cluster.values.items()))
    wrong = [b"!" + value[1:], b"!" + value[1:]]

    class Flaky(dict):
        def get(self, key, default=None):
            return wrong.pop() if wrong and key == name else dict.get(self, key, default)

    cluster.values = Flaky(cluster.values)
    assert bench.get("a", 1000) == (GetResult.OK, b"x" * 1000)
    assert not wrong
    assert store.stats().corrupt_objects == 0


def test_bytes_that_stay_wrong_are_discarded(cluster, opened):
    store = opened()
    bench = stored(store)
    cluster.values["hkv:a"] = b"!" + cluster.values["hkv:a"][1:]
    assert bench.get("a", 1000)[0] is GetResult.CORRUPT
    assert cluster.values == {}
    assert store.stats().corrupt_objects == 1


def test_what_cannot_be_discarded_is_corrupt_all_the_same(cluster, opened):
    store = opened()
    bench = stored(store)
    cluster.values["hkv:a"] = b"!" + cluster.values["hkv:a"][1:]
    client = cluster.clients[-1]
    client.batch_remove = lambda names, **_: [NO_ANSWER] * len(names)
    assert bench.get("a", 1000)[0] is GetResult.CORRUPT


def test_a_batch_that_fails_on_its_way_keeps_what_arrived(cluster, opened):
    store = opened()
    bench = Workbench(store, 1 << 20)
    keys = [f"k/{idx}" for idx in range(600)]
    assert store.put(keys, [bench.source(b"x" * 8) for _ in keys]) == [PutResult.STORED] * 600
    client, get = cluster.clients[-1], cluster.clients[-1].batch_get_into_multi_buffers
    calls = []

    def fails_later(names, *columns):
        calls.append(len(names))
        return get(names, *columns) if len(calls) == 1 else [NO_ANSWER] * len(names)

    client.batch_get_into_multi_buffers = fails_later
    results = store.get(keys, [bench.lay_out(8) for _ in keys])
    assert results == [GetResult.OK] * 256 + [GetResult.FAILED] * 344
    assert calls[0] == 256


def test_calls_are_spared_after_failures_and_tried_again_later(cluster, opened):
    store = opened()
    cluster.answer = NO_ANSWER
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            store.contains(["a"])
    cluster.answer = None
    num_calls = len(cluster.calls)
    with pytest.raises(StoreUnavailableError, match="left alone for a while"):
        store.contains(["a"])
    assert len(cluster.calls) == num_calls
    store._clock.sleep(connection_module.OPEN_S)
    assert store.contains(["a"]) == [False]


def test_a_client_whose_transfers_all_fail_is_replaced(cluster, opened):
    store = opened()
    bench = stored(store)
    wedged = cluster.clients[-1]
    wedged.batch_get_into_multi_buffers = lambda names, *_: [FAILED] * len(names)
    for _ in range(connection_module.FAILURES_TO_REBUILD):
        with pytest.raises(StoreUnavailableError, match="none of 1 values"):
            bench.get("a", 1000)
    assert store.num_rebuilt == 1
    store._clock.sleep(connection_module.OPEN_S)
    assert bench.get("a", 1000) == (GetResult.OK, b"x" * 1000)
    assert cluster.clients[-1] is not wedged


def test_a_call_that_outlasts_its_deadline_goes_on_with_its_memory(cluster, opened):
    store = opened(timeout_s=0.2)
    bench = stored(store)
    free = store._transfers._staging._free
    num_free = free.qsize()
    cluster.hangs.clear()
    with pytest.raises(StoreUnavailableError, match=r"within 0\.2 s"):
        bench.get("a", 1000)
    assert free.qsize() == num_free - 1
    assert store.num_rebuilt == 1
    cluster.hangs.set()
    assert bench.get("a", 1000) == (GetResult.OK, b"x" * 1000)
    with waiting():
        while free.qsize() < num_free:
            pass


@contextmanager
def waiting(limit_s=30):
    """Let a test fail that waits for ever."""
    timer = threading.Timer(limit_s, os.abort)
    timer.start()
    yield
    timer.cancel()
    timer.join()


def test_a_call_on_the_callers_memory_is_waited_for(cluster, opened):
    store = opened(timeout_s=0.1, pack_bytes=1)
    bench = stored(store)
    client, get = cluster.clients[-1], cluster.clients[-1].batch_get_into_multi_buffers
    over = threading.Event()

    def slow(*arguments):
        over.wait(0.5)
        return get(*arguments)

    client.batch_get_into_multi_buffers = slow
    assert bench.get("a", 1000) == (GetResult.OK, b"x" * 1000)


@pytest.mark.parametrize("pack_bytes", [1, 1 << 18])
def test_memory_of_a_late_call_is_free_only_when_its_client_is_down(cluster, opened, pack_bytes):
    """What the library gave up stays in its queues, and may be carried out as long as the client is up."""
    store = opened(timeout_s=0.2, pack_bytes=pack_bytes)
    bench = stored(store)
    raw, free = cluster.clients[-1], store._transfers._staging._free
    num_free, goes_down = free.qsize(), threading.Event()
    gave_up = threading.Event()
    raw.close = lambda: goes_down.wait(30) and FakeClient.close(raw)

    def gives_up(names, *_):
        gave_up.wait(30)
        return [FAILED] * len(names)

    raw.batch_get_into_multi_buffers = gives_up
    over = threading.Event()

    def read():
        with suppress(StoreUnavailableError):
            bench.get("a", 1000)
        over.set()

    reader = threading.Thread(target=read)
    reader.start()
    with waiting():
        while not store.num_rebuilt:
            pass
    gave_up.set()
    assert over.wait(0.5) == (pack_bytes > 1)
    assert free.qsize() == num_free - 1
    goes_down.set()
    reader.join(30)
    with waiting():
        while free.qsize() < num_free:
            pass
    assert not raw._is_up


def test_no_staging_memory_is_an_error_in_time(opened):
    store = opened(timeout_s=0.1)
    bench = stored(store)
    slots = [store._transfers._staging.take(1, 0) for _ in range(4)]
    with pytest.raises(StoreUnavailableError, match="no staging memory"):
        bench.get("a", 1000)
    for slot in slots:
        slot.give_back()
    assert bench.get("a", 1000)[0] is GetResult.OK


def test_a_cluster_that_is_away_at_the_start_is_found_later(cluster, opened):
    cluster.setup_code = -1
    store = opened()
    with pytest.raises(StoreUnavailableError, match="cannot be set up: -1"):
        store.contains(["a"])
    region = store.register(bytearray(100))
    cluster.setup_code = 0
    assert store.put(["a"], [[(region.address, 100)]]) == [PutResult.STORED]


def test_a_frozen_master_is_not_set_up_with(cluster, opened):
    cluster.master.frozen = True
    store = opened()
    assert cluster.clients == []
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.contains(["a"])


def test_no_way_to_the_master_is_an_error_of_the_call(opened):
    store = opened(master="host.invalid:1")
    with pytest.raises(StoreUnavailableError, match=r"no Mooncake master at host\.invalid:1"):
        store.contains(["a"])


def test_leaders_are_left_to_the_library(cluster, opened):
    store = opened(master="etcd://a:2379;b:2379", hostname="me")
    assert store.contains(["a"]) == [False]
    assert cluster.clients[-1].arguments[0][0] == "me"
    assert cluster.clients[-1].arguments[0][6] == "etcd://a:2379;b:2379"


def test_memory_that_the_library_refuses_is_not_registered(cluster, opened):
    store = opened()
    cluster.clients[-1].register_buffer = lambda *_: -600
    buffer = bytearray(100)
    with pytest.raises(StoreError, match="refuses to register 100 bytes"):
        store.register(buffer)
    del cluster.clients[-1].register_buffer
    store.register(buffer)


def test_without_http_a_store_moves_objects_and_counts_nothing(cluster, opened):
    cluster.master.is_away = True
    store = opened()
    bench = stored(store)
    assert bench.get("a", 1000)[0] is GetResult.OK
    with pytest.raises(StoreUnavailableError, match="no HTTP"):
        store.stats()


def test_names_that_are_no_keys_are_anothers(cluster, opened):
    """With them among the keys, nothing could be discarded."""
    store = opened()
    stored(store)
    cluster.values.update(dict.fromkeys(["hkv:", "hkv:\u00e9", "hkv:" + "k" * 201, "a", ""], b"x" * 30))
    assert [info.key for info in store.list()] == ["a"]
    assert store.stats().objects == 1


def test_closing_leaves_a_client_whose_call_hangs(cluster, opened):
    store = opened(timeout_s=0.1)
    cluster.hangs.clear()
    with pytest.raises(StoreUnavailableError, match=r"within 0\.1 s"):
        store.contains(["a"])
    client = cluster.clients[-1]
    store.close()
    assert client._is_up
    cluster.hangs.set()


def test_all_stores_are_closed_when_the_interpreter_ends(cluster, opened):
    store = opened()
    store_module._close_all()
    assert not cluster.clients[-1]._is_up
    with pytest.raises(StoreClosedError):
        store.contains(["a"])


def test_the_interpreter_ends_after_the_calls_of_clients_that_were_replaced_or_left(cluster, opened):
    store = opened(timeout_s=0.1)
    cluster.hangs.clear()
    for _ in range(2):  # the first client is replaced, the second left by `close`
        with pytest.raises(StoreUnavailableError, match=r"within 0\.1 s"):
            store.contains(["a"])
    store._connection._connected()
    num_calls = len(cluster.calls)
    future = store._connection._client.submit(lambda client: client.are_stored(["a"]))
    with waiting():
        while len(cluster.calls) == num_calls:
            pass
    store.close()
    assert [client._is_up for client in cluster.clients] == [True] * 3
    timer = threading.Timer(0.3, cluster.hangs.set)
    timer.start()
    store_module._close_all()
    assert future.result() == [False]
    assert [client._is_up for client in cluster.clients] == [False] * 3
    timer.join()


def test_a_forked_child_leaves_the_parents_client_alone(cluster, opened):
    store = opened()
    store.abandon_after_fork()
    with pytest.raises(StoreClosedError, match="before this process was forked"):
        store.contains(["a"])
    store.close()
    assert cluster.clients[-1]._is_up


def test_a_uri_opens_a_store(cluster, listener, monkeypatch):
    monkeypatch.setattr(store_module, "load_library", lambda: cluster.library)
    store = open_mooncake(parse_store_uri(f"mooncake://{listener}?staging=16MiB&segment=16MiB&tenant=t"))
    (host, metadata, segment, _, protocol, device, master), names = cluster.clients[-1].arguments
    assert (host, metadata, segment, protocol, device) == ("127.0.0.1", "P2PHANDSHAKE", 16 << 20, "tcp", "")
    assert (master, names) == (listener, {"tenant_id": "t"})
    stored(store, data=payload(0, 100))
    store.close()


def num_threads():
    return sum(thread.name.startswith("hybridkv-mooncake") for thread in threading.enumerate())


def test_a_client_that_cannot_be_set_up_leaves_no_threads(cluster, opened):
    cluster.setup_code = -1
    store, before = opened(), num_threads()
    for _ in range(3):
        store._clock.sleep(connection_module.OPEN_S)
        with pytest.raises(StoreUnavailableError, match="cannot be set up"):
            store.contains(["a"])
    assert num_threads() <= before


def test_memory_that_a_new_client_refuses_leaves_no_threads(cluster, opened):
    cluster.setup_code = -1
    store = opened()
    cluster.setup_code = 0
    buffer = bytearray(100)
    region = store.register(buffer)
    store._connection._memory[region.address + 50] = 10  # overlaps: refused
    before = num_threads()
    for _ in range(2):
        store._clock.sleep(connection_module.OPEN_S)
        with pytest.raises(StoreUnavailableError, match="refuses to register"):
            store.contains(["a"])
    with waiting():
        while num_threads() > before:
            pass
    assert not any(client._is_up for client in cluster.clients)


@pytest.mark.parametrize("pack_bytes", [1, 1 << 18])
def test_calls_behind_one_that_hangs_end_in_errors_and_give_their_memory_back(cluster, opened, pack_bytes):
    """Those wait for a thread of a client that is replaced meanwhile."""
    store = opened(timeout_s=0.2, pack_bytes=pack_bytes)
    bench = stored(store)
    free = store._transfers._staging._free
    num_free = free.qsize()
    errors = []

    def note(call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(type(error))

    cluster.hangs.clear()
    hanging = [threading.Thread(target=note, args=(lambda: store.contains(["a"]),)) for _ in range(4)]
    target = bench.lay_out(1000)
    for thread in hanging:
        thread.start()
    with waiting():
        while len(cluster.calls) < 6:  # two of `stored`
            pass
    late = threading.Thread(target=note, args=(lambda: store.get(["a", "b"], [target, target]),))
    late.start()
    for thread in (*hanging, late):
        thread.join(30)
        assert not thread.is_alive()
    assert errors == [StoreUnavailableError] * 5
    cluster.hangs.set()
    with waiting():
        while free.qsize() < num_free:
            pass
    store._clock.sleep(connection_module.OPEN_S)
    assert bench.get("a", 1000) == (GetResult.OK, b"x" * 1000)


def test_a_client_that_another_thread_replaces_meanwhile_is_an_error_of_the_cluster(cluster, opened):
    store = opened()
    bench = stored(store)
    client = store._connection._client
    wedged = cluster.clients[-1]
    wedged.batch_get_into_multi_buffers = lambda names, *_: [FAILED] * len(names)
    client.failed_transfers = connection_module.FAILURES_TO_REBUILD
    is_healthy = client.is_healthy

    def late():
        store._connection._retire(client, "another thread was first")
        with waiting():
            while not client._gate._why_closed:
                pass
        return is_healthy()

    client.is_healthy = late
    with pytest.raises(StoreUnavailableError, match="closed"):
        bench.get("a", 1000)
    assert store.num_rebuilt == 1
