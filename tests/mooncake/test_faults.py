"""Real processes are killed and frozen while one client goes on: right bytes, a miss or an error, no hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.mooncake.connection import OPEN_S
from hybridkv.stores.mooncake.trial import TrialCluster
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench, payload

NUM_BYTES = 300_000
DEADLINE_S = 10.0
"""The setting of the stores here; a call of the store takes several of Mooncake's."""
KEYS = [f"k/{idx}" for idx in range(16)]


class Patient:
    """Uses a store as an engine does: what is unavailable is a miss; every answer is checked."""

    def __init__(self, uri):
        self.store = open_store(f"{uri}&timeout={DEADLINE_S:g}")
        self.bench = Workbench(self.store, 64 << 20)
        self.longest_s = 0.0

    def put(self, keys=KEYS):
        """Return how many are stored now."""
        sources = [self.bench.source(payload(key, NUM_BYTES), 3) for key in keys]
        results = self._timed(lambda: self.store.put(keys, sources))
        return sum(result in {PutResult.STORED, PutResult.ALREADY} for result in results)

    def get(self, keys=KEYS):
        """Return how many were served, all of them right."""
        targets = [self.bench.lay_out(NUM_BYTES, 2) for _ in keys]
        results = self._timed(lambda: self.store.get(keys, targets))
        served = 0
        for key, target, result in zip(keys, targets, results, strict=False):
            if result is GetResult.OK:
                assert self.bench.read(target) == payload(key, NUM_BYTES)
                served += 1
        return served

    def contains(self, keys=KEYS):
        return sum(self._timed(lambda: self.store.contains(keys)))

    def _timed(self, call):
        started_s = time.monotonic()
        try:
            return call()
        except StoreUnavailableError:
            return []
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)

    def recover(self, limit_s=40.0):
        """Go on until all is stored and served again, without a new store."""
        deadline_s = time.monotonic() + limit_s
        while not (self.put() == len(KEYS) and self.get() == len(KEYS)):
            assert time.monotonic() < deadline_s
            time.sleep(0.3)


@pytest.fixture
def cluster(tmp_path):
    running = TrialCluster(tmp_path, num_nodes=2, segment_bytes=64 << 20, lease_s=2)
    yield running
    running.close()


@pytest.fixture
def user(cluster):
    patient = Patient(cluster.uri)
    yield patient
    patient.store.close()


def test_the_master_is_killed_and_comes_back(cluster, user):
    assert user.put() == 16
    cluster.master.kill()
    cluster.master.wait()
    for _ in range(5):
        assert (user.put(), user.get(), user.contains()) == (0, 0, 0)
    assert user.longest_s < 2 * DEADLINE_S
    cluster.start_master()
    user.recover()


def test_a_master_that_is_away_is_soon_not_asked_any_more(cluster, user):
    cluster.master.kill()
    cluster.master.wait()
    for _ in range(3):
        user.contains()
    user.longest_s = 0.0
    for _ in range(100):
        with pytest.raises(StoreUnavailableError, match="left alone for a while"):
            user.store.contains(KEYS)


def test_the_master_is_frozen_and_thawed(cluster, user):
    assert user.put() == 16
    os.kill(cluster.master.pid, signal.SIGSTOP)
    for _ in range(5):
        assert (user.put(), user.get(), user.contains()) == (0, 0, 0)
    assert user.longest_s < 2 * DEADLINE_S
    os.kill(cluster.master.pid, signal.SIGCONT)
    user.recover()


def test_a_storage_node_is_killed(cluster, user):
    assert user.put() == 16
    cluster.nodes[0].kill()
    cluster.nodes[0].wait()
    assert user.get() < 16
    more = [f"more/{idx}" for idx in range(16)]
    user.put(more)
    user.get(more)
    assert user.longest_s < 2 * DEADLINE_S
    user.recover()


def test_all_storage_nodes_are_killed_and_one_comes_back(cluster, user):
    assert user.put() == 16
    for node in cluster.nodes:
        node.kill()
        node.wait()
    for _ in range(5):
        assert user.get() == 0
    assert user.longest_s < 2 * DEADLINE_S
    cluster.start_node()
    user.recover()


def test_a_storage_node_is_frozen_and_thawed(cluster, user):
    assert user.put() == 16
    os.kill(cluster.nodes[0].pid, signal.SIGSTOP)
    for _ in range(3):
        user.get()
        user.put([f"frozen/{idx}" for idx in range(16)])
    assert user.longest_s < 3 * DEADLINE_S
    os.kill(cluster.nodes[0].pid, signal.SIGCONT)
    user.recover()


def test_objects_in_place_survive_a_frozen_storage_node(cluster):
    """The caller's memory is not touched any more when the store has returned."""
    store = open_store(f"{cluster.uri}&pack=1&timeout=1")
    bench = Workbench(store, 32 << 20)
    keys = [f"large/{idx}" for idx in range(8)]
    datas = [payload(key, 1 << 20) for key in keys]
    assert store.put(keys, [bench.source(data) for data in datas]) == [PutResult.STORED] * 8
    os.kill(cluster.nodes[0].pid, signal.SIGSTOP)
    targets = [bench.lay_out(1 << 20) for _ in keys]
    try:
        results = store.get(keys, targets)
    except StoreUnavailableError:
        results = []
    for target in targets:
        bench.write(target, b"\x11" * (1 << 20))
    os.kill(cluster.nodes[0].pid, signal.SIGCONT)
    time.sleep(3)
    assert len(results) in {0, 8}
    assert [bench.read(target) for target in targets] == [b"\x11" * (1 << 20)] * 8
    store.close()


def test_the_process_ends_in_order_while_a_call_hangs(cluster):
    """The bare library crashes when it is taken down during a call."""
    script = """
import os, signal, sys
from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench
store = open_store(sys.argv[1])
bench = Workbench(store, 1 << 20)
keys = [f"late/{idx}" for idx in range(16)]
store.put(keys, [bench.source(b"x" * 1000) for _ in keys])
os.kill(int(sys.argv[2]), signal.SIGSTOP)
try:
    store.get(keys, [bench.lay_out(1000) for _ in keys])
except StoreUnavailableError as error:
    print(error)
"""
    node = cluster.nodes[0]
    done = subprocess.run(
        [sys.executable, "-c", script, f"{cluster.uri}&timeout=1", str(node.pid)],
        check=False,
        capture_output=True,
        timeout=120,
    )
    os.kill(node.pid, signal.SIGCONT)
    assert b"within 1 s" in done.stdout
    assert done.returncode == 0


def test_the_master_is_absent_at_the_start(tmp_path):
    first = TrialCluster(tmp_path, num_nodes=0)
    uri = first.uri
    first.close()
    user = Patient(uri)
    assert (user.put(), user.get(), user.contains()) == (0, 0, 0)
    assert user.longest_s < DEADLINE_S
    first.start_master()
    first.start_node()
    user.recover()
    user.store.close()
    first.close()


def test_a_wedged_client_is_replaced(cluster):
    """The library has its default queues there: 4,096 slices at once for each node hang it for ever."""
    script = Path(__file__).with_name("wedged_client.py")
    queues = {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "1024",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "1024",
    }
    done = subprocess.run(
        [sys.executable, script, cluster.uri],
        env={**os.environ, **queues},
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.decode().split() == ["wedged", "replaced", "right"]


def test_a_client_whose_transfers_all_fail_under_a_healthy_master_is_replaced(user, monkeypatch):
    """As after a wedge: every transfer of that client fails from then on."""
    assert user.put() == 16
    client = user.store._connection._client
    raw = client._raw

    class Wedged:
        def __getattr__(self, name):
            return getattr(raw, name)

        def batch_get_into_multi_buffers(self, names, *_):
            return [-800] * len(names)

    monkeypatch.setattr(client, "_raw", Wedged())
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="none of 16 values"):
            user.store.get(KEYS, [user.bench.lay_out(NUM_BYTES) for _ in KEYS])
    assert user.store.num_rebuilt == 1
    user.recover(OPEN_S + 20)


def test_a_call_that_outlasts_its_deadline_keeps_its_staging_memory(cluster, user):
    """Until it really ends: nobody else's object is written where it still reads."""
    user.store.close()
    user.store = store = open_store(f"{cluster.uri}&timeout=1")
    user.bench = Workbench(store, 64 << 20)
    transfers = store._transfers
    before = transfers._staging._free.qsize()
    client, goes_on = store._connection._client, threading.Event()
    put = client.put

    def slow(*arguments, **names):
        goes_on.wait(30)
        return put(*arguments, **names)

    client.put = slow
    with pytest.raises(StoreUnavailableError, match="within 1 s"):
        store.put(["late"], [user.bench.source(b"x" * 1000)])
    assert transfers._staging._free.qsize() == before - 1
    goes_on.set()
    deadline_s = time.monotonic() + 20
    while transfers._staging._free.qsize() < before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    user.recover()


def test_closing_does_not_wait_for_a_call_that_hangs(cluster):
    store = open_store(f"{cluster.uri}&timeout=1")
    bench = Workbench(store, 1 << 20)
    goes_on = threading.Event()
    store._connection._client.put = lambda *_, **__: goes_on.wait(60) and []
    with pytest.raises(StoreUnavailableError, match="within 1 s"):
        store.put(["late"], [bench.source(b"x" * 1000)])
    started_s = time.monotonic()
    store.close()
    assert time.monotonic() - started_s < 10
    goes_on.set()
