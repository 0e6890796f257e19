"""Differential: hybridkv's hits beside those of vLLM 0.32's in-tree Mooncake connector, classes unchanged.

Named exceptions, kept out of the random layouts: a window of 1 (needs nothing; vLLM answers 0 or asserts) and
extra retained tokens (vLLM's specs have none). Recurrent groups are left to the benchmark: with a finer hash
unit vLLM ends hits inside a block, hybridkv does not.
"""

import random

import pytest

from hybridkv.keys import KeyScheme, Namespace
from hybridkv.plan.save import plan_save
from hybridkv.service.lookup import LookupDriver
from hybridkv.stores.memory import MemoryStore
from lookup_layouts import Row
from vllm_peer import Group, blob_hashes

DIGEST_BYTES = 32


def random_row(rng, *, eagle):
    sizes = rng.choice([(4,), (4, 8), (4, 8, 16), (16, 32), (8, 24)])
    groups, taken = [], set()
    for _ in range(rng.randint(1, 4)):
        kind, size, window = (
            rng.choice(["full", "mla", "swa", "swa", "swa_mla"]),
            rng.choice(sizes),
            rng.randint(2, 70),
        )
        if (kind, size, window if kind.startswith("swa") else 0) in taken:
            continue
        taken.add((kind, size, window if kind.startswith("swa") else 0))
        groups.append(
            Group(
                kind=kind,
                block_size=size,
                window=window if kind.startswith("swa") else 0,
                eagle=eagle and rng.random() < 0.5,
                head_size=64 + 8 * len(groups),
            )
        )
    # vLLM asks that a single group's hash unit is its block size.
    unit = groups[0].block_size if len(groups) == 1 else 4
    if any(group.block_size % unit for group in groups):
        unit = 4
    return Row(name="random", groups=tuple(groups), hash_unit=unit, tp=rng.choice([1, 1, 2]))


class Pair:
    """Both systems with equal contents."""

    def __init__(self, row, num_tokens, blob):
        self.peer, self.layout, self.blob = row.peer(), row.layout(), blob
        self.num_tokens = num_tokens
        self.units = [blob[i : i + DIGEST_BYTES] for i in range(0, len(blob), DIGEST_BYTES)]
        self.scheme = KeyScheme(Namespace(model_version="m"), self.layout, digest_bytes=DIGEST_BYTES)
        self.store, self.peers = MemoryStore(keep_payloads=False), set()

    def hold(self, spec_group, objects):
        group = self.layout.spec_groups[spec_group]
        for rank in range(group.num_ranks):
            keys = [
                key
                for idx in objects
                for key in self.scheme.keys(spec_group, rank, range(idx, idx + 1), self.blob)
            ]
            self.store.put(keys, [((0, 1),)] * len(keys))
        for gid in group.cache_groups:
            for idx in objects:
                self.peers.update(self.peer.block_keys(gid, (idx + 1) * group.object_size, self.units))

    def hits(self):
        def exists(keys):
            return [int(key in self.peers) for key in keys]

        driver = LookupDriver(self.store, self.scheme)
        ours = driver.lookup(self.num_tokens, self.blob).result.hit
        driver.close()
        theirs = self.peer.lookup(self.num_tokens, blob_hashes(self.blob, DIGEST_BYTES), exists)
        return ours, theirs


def fill_at_random(pair, rng):
    pattern = rng.choice(["run", "holes", "sparse", "saved"])
    if pattern == "saved":
        retention = rng.choice(["all", 0, 2 * pair.layout.alignment])
        shared = rng.randint(0, pair.num_tokens)
        plans = plan_save(
            pair.layout, retention=retention, start=0, stop=pair.num_tokens, num_tokens=pair.num_tokens
        )
        for group, plan in zip(pair.layout.spec_groups, plans, strict=True):
            pair.hold(
                group.index, [i for i in plan.indices().tolist() if (i + 1) * group.object_size <= shared]
            )
        return
    share = {"run": 1.0, "holes": 0.95, "sparse": rng.random()}[pattern]
    for group in pair.layout.spec_groups:
        count = pair.num_tokens // group.object_size
        stop = rng.randint(0, count) if pattern == "run" else count
        pair.hold(group.index, [i for i in range(stop) if rng.random() < share])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eagle", [False, True])
def test_hits_are_equal_without_lookahead_and_equal_or_longer_with_it(eagle, seed):
    rng = random.Random(seed)
    num_hits = num_longer = 0
    for _ in range(100):
        row = random_row(rng, eagle=eagle)
        num_tokens = rng.randint(1, 300)
        pair = Pair(row, num_tokens, rng.randbytes(num_tokens // row.hash_unit * DIGEST_BYTES))
        assert pair.layout.alignment == pair.peer.scheduler_block
        fill_at_random(pair, rng)
        ours, theirs = pair.hits()
        if any(group.eagle for group in row.groups):
            assert ours >= theirs, row
        else:
            assert ours == theirs, row
        num_hits += theirs > 0
        num_longer += ours > theirs
    assert num_hits > 20
    assert eagle or not num_longer


MTP = Row(
    name="DeepSeek-V4 with MTP",
    groups=(
        Group(kind="mla", block_size=256, head_size=64),
        Group(kind="swa_mla", block_size=64, window=128, head_size=72),
        Group(kind="swa_mla", block_size=64, window=128, eagle=True, head_size=80),
        Group(kind="swa_mla", block_size=4, window=8, head_size=88),
        Group(kind="swa_mla", block_size=8, window=128, head_size=96),
    ),
    hash_unit=4,
)


@pytest.mark.parametrize(
    ("num_tokens", "hit", "peers"), [(1000, 768, 512), (4000, 3840, 3584), (4200, 4096, 3840)]
)
def test_deepseek_v4_with_mtp_is_resumed_one_alignment_later(num_tokens, hit, peers):
    pair = Pair(MTP, num_tokens, random.Random(1).randbytes(num_tokens // 4 * DIGEST_BYTES))
    plans = plan_save(pair.layout, retention=0, start=0, stop=num_tokens, num_tokens=num_tokens)
    for group, plan in zip(pair.layout.spec_groups, plans, strict=True):
        pair.hold(group.index, plan.indices().tolist())
    pair.peers |= set(pair.peer.all_keys(num_tokens, pair.units))
    assert pair.hits() == (hit, peers)
