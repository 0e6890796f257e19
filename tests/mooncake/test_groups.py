"""What becomes of the shards of a block that several ranks have stored, each by itself."""

import time
from collections import Counter

import pytest

from hybridkv.keys import key_parts
from hybridkv.stores.base import PutResult
from hybridkv.stores.mooncake.trial import TrialCluster
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench

RANKS, NUM_BYTES, LEASE_S = 4, 500_000, 2


def shards(rank, blocks):
    return [f"hkv1/f/0/{rank}/{block:04x}" for block in blocks]


def ranks_held(store):
    """Return how many ranks' shards of each block are stored."""
    return Counter(int(key_parts(info.key).block_hash, 16) for info in store.list("hkv1/"))


@pytest.fixture
def make_cluster(tmp_path):
    running = []

    def make(num_nodes):
        running.append(TrialCluster(tmp_path, num_nodes=num_nodes, segment_bytes=64 << 20, lease_s=LEASE_S))
        return running[-1]

    yield make
    running[0].close()


def test_shards_are_evicted_together_and_a_lease_on_one_protects_all(make_cluster):
    store = open_store(make_cluster(1).uri)
    bench = Workbench(store, 16 << 20)
    source, blocks = bench.source(b"x" * NUM_BYTES), range(24)
    for rank in range(RANKS):
        assert store.put(shards(rank, blocks), [source] * len(blocks)) == [PutResult.STORED] * len(blocks)
    time.sleep(LEASE_S + 0.5)  # putting looked all of them up
    for turn in range(60):
        assert store.contains(shards(0, blocks[:6])) == [True] * 6
        store.put([f"other/{turn}"], [source])
        time.sleep(0.03)
    held = ranks_held(store)
    assert set(held.values()) == {RANKS}
    assert set(held) >= set(blocks[:6])
    assert len(held) < len(blocks)
    store.close()


def test_shards_lie_on_several_nodes_so_that_all_ranks_must_be_asked(make_cluster):
    cluster = make_cluster(2)
    store = open_store(cluster.uri)
    bench = Workbench(store, 16 << 20)
    source, blocks = bench.source(b"x" * NUM_BYTES), range(16)
    for rank in range(RANKS):
        store.put(shards(rank, blocks), [source] * len(blocks))
    cluster.nodes[0].kill()
    cluster.nodes[0].wait()
    deadline_s = time.monotonic() + 30
    while sum(ranks_held(store).values()) == RANKS * len(blocks):
        assert time.monotonic() < deadline_s
        time.sleep(0.3)
    assert set(ranks_held(store).values()) & set(range(1, RANKS))
    store.close()
