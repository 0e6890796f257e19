import multiprocessing
import os
import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from hybridkv.errors import StoreClosedError, StoreUnavailableError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.mooncake.client import Client
from hybridkv.stores.mooncake.library import load_library
from hybridkv.stores.mooncake.settings import settings_of
from hybridkv.stores.mooncake.trial import TrialCluster
from hybridkv.stores.registry import open_store, parse_store_uri
from hybridkv.testing.stores import StoreTests, Workbench, payload, run_store_machine


class Reused:
    """A store that stays open for the next example: taking a client down holds the GIL for two seconds."""

    def __init__(self, store):
        self.inner, self.regions = store, []
        self.is_closed = False

    def __getattr__(self, name):
        if self.is_closed:
            raise StoreClosedError("closed")
        return getattr(self.inner, name)

    def register(self, buffer):
        region = self.__getattr__("register")(buffer)
        self.regions.append(region)
        return region

    def unregister(self, region):
        self.__getattr__("unregister")(region)
        self.regions.remove(region)

    def close(self):
        self.is_closed = True
        for region in self.regions:
            self.inner.unregister(region)
        self.regions = []


@pytest.fixture(scope="module")
def shared(cluster):
    opened = open_store(cluster.uri)
    yield opened
    opened.close()


def emptied(store):
    store.discard([info.key for info in store.list()])
    return store


class TestContract(StoreTests):
    """Small objects, which are packed; each example has a client of its own."""

    capacity_objects = None
    is_lru = False

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster):
        self.uri = cluster.uri

    def make_store(self, _capacity_bytes):
        return emptied(open_store(self.uri))


class TestContractInPlace(TestContract):
    """Objects that are never packed, through one client."""

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster):
        self.uri = f"{cluster.uri}&pack=1"

    def make_store(self, _capacity_bytes):
        return emptied(open_store(self.uri))


def test_it_behaves_like_a_dict(shared):
    run_store_machine(lambda _: Reused(emptied(shared)), max_examples=15)


def test_two_clients_share_what_they_store(cluster, store):
    data = payload(0, 100_000)
    other = open_store(cluster.uri)
    mine, theirs = Workbench(store, 1 << 20), Workbench(other, 1 << 20)
    assert mine.put("a", data, 5) is PutResult.STORED
    assert theirs.put("a", payload(1, 100_000)) is PutResult.ALREADY
    assert theirs.get("a", len(data), 3) == (GetResult.OK, data)
    other.discard(["a"])
    other.close()
    assert mine.get("a", len(data))[0] is GetResult.ABSENT


@pytest.mark.parametrize("num_segments", [1, 8, 64])
@pytest.mark.parametrize("num_bytes", [4096, 1 << 20, 4 << 20])
def test_objects_of_every_size_and_shape_come_back(store, num_bytes, num_segments):
    bench = Workbench(store, 64 << 20)
    datas = {f"k/{idx}": payload(idx, num_bytes) for idx in range(6)}
    sources = [bench.source(data, num_segments) for data in datas.values()]
    assert store.put(list(datas), sources) == [PutResult.STORED] * 6
    for key, data in datas.items():
        assert bench.get(key, num_bytes, num_segments) == (GetResult.OK, data)


def test_a_batch_that_wedges_the_bare_client_passes(store):
    """64 objects of 64 segments of 16 KiB: 4,096 slices at once hang it for a minute and then for ever."""
    source = np.random.default_rng(1).integers(0, 256, (64, 64, 16 << 10), dtype=np.uint8)
    target = np.zeros_like(source)
    regions = [store.register(array) for array in (source, target)]
    batches = [
        [
            [(region.address + (segment * 64 + idx) * (16 << 10), 16 << 10) for segment in range(64)]
            for idx in range(64)
        ]
        for region in regions
    ]
    keys = [f"wide/{idx}" for idx in range(64)]
    assert store.put(keys, batches[0]) == [PutResult.STORED] * 64
    assert store.get(keys, batches[1]) == [GetResult.OK] * 64
    assert (source == target).all()


def test_ten_thousand_small_objects_in_a_batch(store):
    data = np.random.default_rng(2).integers(0, 256, (10_000, 64), dtype=np.uint8)
    target = np.zeros_like(data)
    source_region, target_region = store.register(data), store.register(target)
    keys = [f"many/{idx}" for idx in range(10_000)]
    sources, targets = (
        [[(region.address + 64 * idx, 64)] for idx in range(10_000)]
        for region in (source_region, target_region)
    )
    assert store.put(keys, sources) == [PutResult.STORED] * 10_000
    assert store.contains(keys) == [True] * 10_000
    assert store.get(keys, targets) == [GetResult.OK] * 10_000
    assert (data == target).all()
    store.discard(keys)
    assert not any(store.contains(keys))


def test_an_object_of_ten_thousand_small_segments(store):
    data = np.arange(160_000, dtype=np.uint8)
    target = np.zeros_like(data)
    source_region, target_region = store.register(data), store.register(target)
    order = random.Random(3).sample(range(10_000), 10_000)
    source, wanted = (
        [(region.address + 16 * idx, 16) for idx in order] for region in (source_region, target_region)
    )
    assert store.put(["one"], [source]) == [PutResult.STORED]
    assert store.get(["one"], [wanted]) == [GetResult.OK]
    assert (data == target).all()


def test_an_object_larger_than_a_staging_slot_is_packed_all_the_same(store):
    data = np.random.default_rng(4).integers(0, 256, 24 << 20, dtype=np.uint8)
    target = np.zeros_like(data)
    regions = [store.register(array) for array in (data, target)]
    size = len(data) // 512
    source, wanted = (
        [(region.address + idx * size, size) for idx in reversed(range(512))] for region in regions
    )
    assert store.put(["large"], [source]) == [PutResult.STORED]
    assert store.get(["large"], [wanted]) == [GetResult.OK]
    assert (data == target).all()


def test_one_key_may_stand_in_a_get_several_times_with_several_sizes(store):
    bench, data = Workbench(store, 1 << 20), payload(0, 300)
    bench.put("a", data)
    sizes = [300, 299, 300, 301, 300]
    targets = [bench.lay_out(size, 2) for size in sizes]
    results = store.get(["a"] * 5, targets)
    assert results == [GetResult.OK if size == 300 else GetResult.CORRUPT for size in sizes]
    assert [bench.read(targets[idx]) == data for idx in (0, 2, 4)] == [True] * 3


@pytest.mark.parametrize("num_bytes", [1000, 2 << 20])
@pytest.mark.parametrize("where", ["payload", "trailer"])
def test_a_flipped_byte_is_found_discarded_and_stored_anew(cluster, store, where, num_bytes):
    bench, data = Workbench(store, 16 << 20), payload(0, num_bytes)
    bench.put("a", data)
    at = 10 if where == "payload" else num_bytes + 12
    spoil(cluster, "a", lambda value: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
    assert bench.get("a", num_bytes)[0] is GetResult.CORRUPT
    assert store.stats().corrupt_objects == 1
    assert not bench.contains("a")
    assert bench.put("a", data) is PutResult.STORED
    assert bench.get("a", num_bytes) == (GetResult.OK, data)


def test_a_value_of_the_wrong_size_is_corrupt_and_after_a_discard_stored_anew(cluster, store):
    bench, data = Workbench(store, 1 << 20), payload(0, 1000)
    bench.put("a", data)
    for change in (lambda value: value[:-1], lambda value: value + b"x", lambda _: b"y"):
        spoil(cluster, "a", change)
        assert bench.get("a", 1000)[0] is GetResult.CORRUPT
        store.discard(["a"])
        assert bench.put("a", data) is PutResult.STORED
        assert bench.get("a", 1000) == (GetResult.OK, data)


def test_another_objects_value_under_a_key_is_corrupt(cluster, store):
    bench = Workbench(store, 1 << 20)
    bench.put("a", payload("a", 1000))
    bench.put("b", payload("b", 1000))
    value = {}
    spoil(cluster, "b", lambda found: value.setdefault("b", found))
    spoil(cluster, "a", lambda _: value["b"])
    assert bench.get("a", 1000)[0] is GetResult.CORRUPT
    assert bench.get("b", 1000) == (GetResult.OK, payload("b", 1000))


def test_without_checksums_a_flipped_byte_passes_and_the_others_take_it_for_corrupt(cluster, store):
    data = payload(0, 1000)
    bare = open_store(f"{cluster.uri}&checksum=off")
    bench, checked = Workbench(bare, 1 << 20), Workbench(store, 1 << 20)
    assert bench.put("a", data) is PutResult.STORED
    spoil(cluster, "a", lambda value: b"\0" + value[1:])
    assert bench.get("a", 1000) == (GetResult.OK, b"\0" + data[1:])
    assert checked.get("a", 1000)[0] is GetResult.CORRUPT
    bare.close()


def spoil(cluster, key, change):
    """Replace a value behind the store's back, by Mooncake's own calls."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_spoil, args=(cluster.uri, key, theirs))
    process.start()
    ours.send(change(ours.recv()))
    assert ours.recv() == 0
    process.join()


def _spoil(uri, key, pipe):
    raw = Client(load_library(), settings_of(parse_store_uri(uri)))._raw
    name = f"hkv:{key}"
    pipe.send(raw.get(name))
    new = pipe.recv()
    assert raw.remove(name, True) == 0
    pipe.send(raw.put(name, new))
    os._exit(0)


def test_what_others_keep_in_the_cluster_is_neither_listed_nor_counted(store):
    code = []

    def foreign(client):
        code.append(client._raw.put("theirs", b"x" * 100))

    store._connection.call(foreign)
    Workbench(store, 1000).put("ours", b"y" * 100)
    assert code == [0]
    assert [info.key for info in store.list()] == ["ours"]
    assert (store.stats().objects, store.stats().used_bytes) == (1, 100)
    store._connection.call(lambda client: client._raw.remove("theirs", True))


def test_listing_takes_no_lease(store):
    """What was only listed and counted can be removed without force."""
    Workbench(store, 1000).put("a", b"y" * 100)
    assert [info.key for info in store.list()] == ["a"]
    assert store.stats().objects == 1
    assert store._connection.call(lambda client: client._raw.remove("hkv:a", False)) == 0
    Workbench(store, 1000).put("a", b"y" * 100)
    assert store.contains(["a"]) == [True]
    assert store._connection.call(lambda client: client._raw.remove("hkv:a", False)) == -706


def test_a_client_is_never_called_before_it_is_set_up_or_after_it_is_closed(cluster):
    """The bare library ends the process then."""
    store = emptied(open_store(cluster.uri))
    bench = Workbench(store, 1000)
    client = store._connection._client
    store.close()
    for call in (lambda: bench.put("a", b"x"), lambda: bench.get("a", 1), lambda: store.contains(["a"])):
        with pytest.raises(StoreClosedError):
            call()
    with pytest.raises(StoreClosedError):
        client.are_stored(["a"])
    with pytest.raises(StoreClosedError):
        client.put(["a"], [[8]], [[1]], ["a"])


def test_closing_waits_for_the_calls_in_flight(cluster):
    store = emptied(open_store(cluster.uri))
    bench, data, errors = Workbench(store, 2 << 20), payload(0, 1 << 20), []
    assert bench.put("a", data) is PutResult.STORED
    began = threading.Barrier(7)

    def read(own):
        try:
            assert own.get("a", len(data)) == (GetResult.OK, data)
            began.wait()
            while True:
                assert own.get("a", len(data)) == (GetResult.OK, data)
        except StoreClosedError:
            pass
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)
            began.abort()

    threads = [threading.Thread(target=read, args=(Workbench(store, 4 << 20),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        began.wait()
    store.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


def test_threads_with_large_and_small_objects(store):
    """More callers than staging slots: none waits for ever."""
    failures = []

    def work(seed):
        chance, bench = random.Random(seed), Workbench(store, 24 << 20)
        try:
            for turn in range(8):
                size = chance.choice([100, 70_000, 1 << 20, 5 << 20])
                datas = {f"{seed}/{turn}/{idx}": payload(idx, size) for idx in range(3)}
                sources = [bench.source(data, chance.choice([1, 3, 40])) for data in datas.values()]
                assert store.put(list(datas), sources) == [PutResult.STORED] * 3
                for key, data in datas.items():
                    assert bench.get(key, size, chance.choice([1, 3, 40])) == (GetResult.OK, data)
                store.discard(list(datas))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures


def test_a_forked_child_is_refused(cluster):
    store = emptied(open_store(cluster.uri))
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store.contains(["a"])
        except StoreClosedError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"before this process was forked" in os.read(reader, 1000)
    assert store.contains(["a"]) == [False]
    store.close()


def test_the_shards_of_all_ranks_are_one_group(store, monkeypatch):
    """So that Mooncake evicts them together."""
    groups = []
    put = Client.put
    monkeypatch.setattr(
        Client,
        "put",
        lambda *args, **names: groups.extend(names["groups"]) or put(*args, **names),
    )
    bench = Workbench(store, 1000)
    source = bench.source(b"z" * 10)
    store.put([f"hkv1/f/2/{rank}/abc" for rank in range(3)], [source] * 3)
    store.put(["other"], [source])
    assert groups == ["hkv:hkv1/f/2/abc"] * 3 + ["hkv:other"]


def test_a_store_that_is_full_refuses_and_stores_again_later(tmp_path):
    cluster = TrialCluster(tmp_path, segment_bytes=32 << 20, lease_s=1)
    store = emptied(open_store(cluster.uri))
    try:
        bench, size = Workbench(store, 64 << 20), 1 << 20
        keys = [f"k/{idx}" for idx in range(60)]
        results = store.put(keys, [bench.source(payload(key, size)) for key in keys])
        assert set(results) == {PutResult.STORED, PutResult.REFUSED}
        for key, result in zip(keys, results, strict=True):
            found, data = bench.get(key, size)
            assert found in {GetResult.OK, GetResult.ABSENT}
            assert found is GetResult.ABSENT or (data == payload(key, size) and result is PutResult.STORED)
        later = [f"later/{idx}" for idx in range(60)]
        stored = []
        for key in later:
            for _ in range(30):
                if bench.put(key, payload(key, size)) is not PutResult.REFUSED:
                    stored.append(key)
                    break
        assert stored == later
        assert bench.get(later[-1], size) == (GetResult.OK, payload(later[-1], size))
        assert store.stats().evicted_objects > 0
    finally:
        store.close()
        cluster.close()


def test_two_clients_of_one_process_do_not_meet(cluster):
    first, second = emptied(open_store(cluster.uri)), open_store(cluster.uri)
    bench = Workbench(first, 1 << 20)
    bench.put("a", payload(0, 1000))
    second.close()
    assert bench.get("a", 1000) == (GetResult.OK, payload(0, 1000))
    first.close()
    with pytest.raises(StoreClosedError):
        second.contains(["a"])


def test_a_master_that_is_absent_is_an_error_of_the_call_not_of_the_opening():
    store = open_store("mooncake://127.0.0.1:9?http=9")
    with pytest.raises(StoreUnavailableError, match="no Mooncake master at 127"):
        store.contains(["a"])
    store.close()
