"""The search against the oracle: the same hit, few keys, and nothing asked that cannot matter."""

import random
from itertools import islice
from math import ceil, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, StoreError
from hybridkv.plan.load import plan_load
from hybridkv.plan.lookup import PROOFS, SENTINELS, Ask, Lookup
from hybridkv.plan.save import plan_save
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import catalogue, find_layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from tests.plan import oracle
from tests.plan.strategies import layouts


class Store:
    """Presence per spec group and rank; notes what is asked and refuses to be asked twice."""

    def __init__(self, layout, num_tokens, held):
        self.held, self.asked, self.steps = held, set(), 0
        self.counts = [num_tokens // group.object_size for group in layout.spec_groups]

    def answer(self, ask):
        objects = ask.objects.tolist()
        assert objects == sorted(set(objects))
        assert objects
        for idx in objects:
            assert (ask.spec_group, ask.rank, idx) not in self.asked
            assert 0 <= idx < self.counts[ask.spec_group]
            self.asked.add((ask.spec_group, ask.rank, idx))
        return [idx in self.held[ask.spec_group][ask.rank] for idx in objects]


def looked_up(layout, num_tokens, held, device_prefix=0, most_steps=None):
    store = Store(layout, num_tokens, held)
    search = Lookup(layout, num_tokens, device_prefix=device_prefix)
    for asks in islice(search.steps(), most_steps):
        for ask in asks:
            search.learn(ask, store.answer(ask))
    return search.result(), store


def everywhere(layout, objects):
    """The same objects on every rank."""
    return [[held] * group.num_ranks for group, held in zip(layout.spec_groups, objects, strict=True)]


PATTERNS = ("runs", "holes", "sparse", "tails", "rank holes")


def random_presence(layout, groups, num_tokens, rng):
    """Per spec group and rank a set of objects, in one of the ways that stores look in practice or worse."""
    pattern = rng.choice(PATTERNS)
    counts = [num_tokens // group.object_size for group in layout.spec_groups]
    if pattern == "runs":
        held = [
            set(range(rng.randint(0, count))) if rng.random() < 0.7 else set(range(count)) for count in counts
        ]
    elif pattern == "tails":
        # An earlier prompt, saved at some retention, shares a part; then some of it was evicted.
        shared = rng.randint(0, num_tokens)
        earlier = rng.randint(max(1, shared), num_tokens + 50)
        retention = rng.choice(["all", 0, layout.alignment, 2 * layout.alignment])
        held = [
            {i for i in saved if (i + 1) * group["size"] <= shared}
            for saved, group in zip(oracle.saved(groups, retention, earlier), groups, strict=True)
        ]
    else:
        share = {"holes": 0.97, "sparse": rng.random(), "rank holes": 1.0}[pattern]
        held = [{i for i in range(count) if rng.random() < share} for count in counts]
    by_rank = everywhere(layout, held)
    if pattern == "rank holes":
        lost = rng.choice([0.0, 0.02, 0.2])
        by_rank = [[{i for i in one if rng.random() >= lost} for one in ranks] for ranks in by_rank]
    return by_rank


def expected_hit(groups, num_tokens, by_rank, device_prefix):
    on_every_rank = [set.intersection(*ranks) for ranks in by_rank]
    device = [
        held | set(range(device_prefix // group["size"]))
        for held, group in zip(on_every_rank, groups, strict=True)
    ]
    return max(device_prefix, oracle.hit(groups, num_tokens, device))


def check_one(layout, groups, num_tokens, device_prefix, rng):
    by_rank = random_presence(layout, groups, num_tokens, rng)
    result, store = looked_up(layout, num_tokens, by_rank, device_prefix)
    hit = expected_hit(groups, num_tokens, by_rank, device_prefix)
    assert result.hit == hit
    assert result.loads == plan_load(layout, hit, device_prefix=device_prefix)
    check_proven(result, store, by_rank)
    cut, cut_store = looked_up(layout, num_tokens, by_rank, device_prefix, rng.randint(0, result.steps))
    assert cut.hit <= hit
    check_proven(cut, cut_store, by_rank)
    assert sum(result.keys_asked) == len(store.asked)
    loaded = [
        {(g.index, r, i) for i in load for r in range(g.num_ranks)}
        for g, load in zip(layout.spec_groups, result.loads, strict=True)
    ]
    assert list(result.keys_useful) == [len(want & store.asked) for want in loaded]
    check_asked(groups, num_tokens, device_prefix, by_rank, store)
    for hole in result.rank_holes:
        assert hole.object_idx in by_rank[hole.spec_group][0]
        assert hole.object_idx not in by_rank[hole.spec_group][hole.rank]


def check_proven(result, store, by_rank):
    """Whatever is to be loaded was asked of every rank and is there."""
    for index, load in enumerate(result.loads):
        for rank, held in enumerate(by_rank[index]):
            assert set(load) <= held
            assert {(index, rank, idx) for idx in load} <= store.asked


def check_asked(groups, num_tokens, device_prefix, by_rank, store):
    """Only what some candidate above the device needs; of other ranks only what the first one has."""
    possible = [b for b in oracle.candidates(groups, num_tokens) if device_prefix < b < num_tokens]
    for index, group in enumerate(groups):
        useful = set().union(*(oracle.objects(group, b, group["lookahead"]) for b in possible))
        useful -= set(range(device_prefix // group["size"]))
        assert {i for g, _, i in store.asked if g == index} <= useful
        others = {i for g, rank, i in store.asked if g == index and rank}
        assert others <= by_rank[index][0]


@settings(max_examples=500, deadline=None)
@given(layouts(), st.integers(1, 400), st.integers(0, 200), st.randoms(use_true_random=False))
def test_the_hit_is_the_oracles_and_no_key_is_asked_in_vain(made, num_tokens, device_units, rng):
    layout, groups = made
    device_prefix = min(2 * device_units, num_tokens) if rng.random() < 0.4 else 0
    if rng.random() < 0.5:
        device_prefix = device_prefix // layout.alignment * layout.alignment
    check_one(layout, groups, num_tokens, device_prefix, rng)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(layouts(), st.integers(1, 900), st.integers(0, 450), st.randoms(use_true_random=False))
def test_the_hit_is_the_oracles_in_twenty_thousand_cases(made, num_tokens, device_units, rng):
    layout, groups = made
    device_prefix = min(2 * device_units, num_tokens) if rng.random() < 0.4 else 0
    check_one(layout, groups, num_tokens, device_prefix, rng)


def sentinel_bound(layout, num_tokens):
    """The most sentinels that the search for the ends of runs may ask, as docs/lookup.md states it."""
    total = 0
    for group in layout.spec_groups:
        if group.spec.downward_closed:
            count = max(2, num_tokens // group.object_size)
            total += (SENTINELS + 1) * ceil(log(count, SENTINELS) + 1)
    return total


def tails(layout, boundary):
    return sum(
        len(group.needed_objects(boundary, group.lookahead))
        for group in layout.spec_groups
        if not group.spec.downward_closed
    )


def saved_by_plan(layout, retention, num_tokens, shared):
    plans = plan_save(layout, retention=retention, start=0, stop=num_tokens, num_tokens=num_tokens)
    return [
        {i for i in plan.indices().tolist() if (i + 1) * group.object_size <= shared}
        for group, plan in zip(layout.spec_groups, plans, strict=True)
    ]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("share", [0, 1 / 3, 1 / 2, 1])
@pytest.mark.parametrize("retention", ["all", 0, 8])
@pytest.mark.parametrize("model", catalogue())
def test_what_plans_leave_is_found_within_the_documented_bound(model, retention, share, tp):
    layout, num_tokens = find_layout(model).with_tp(tp), 40_007
    every = retention * layout.alignment if retention else retention
    held = saved_by_plan(layout, every if retention != "all" else "all", num_tokens, int(num_tokens * share))
    result, store = looked_up(layout, num_tokens, everywhere(layout, held))
    needed = sum(
        len(group.needed_objects(result.hit, group.lookahead)) * group.num_ranks
        for group in layout.spec_groups
    )
    runs = [len(held[g.index]) * g.object_size for g in layout.spec_groups if g.spec.downward_closed]
    bound = min(runs) // layout.alignment * layout.alignment
    candidates = max(0, bound - result.hit) // layout.alignment
    most = needed + sentinel_bound(layout, num_tokens) + candidates + PROOFS + tails(layout, bound)
    assert len(store.asked) <= most


@pytest.mark.parametrize("share", [0, 1 / 10, 1 / 3, 1 / 2, 9 / 10])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(
            name="states",
            groups=(
                CacheGroup(name="f", spec=Full(block_size=16)),
                CacheGroup(name="s", spec=Recurrent(block_size=16)),
            ),
        ),
        find_layout("deepseek-v4"),
        find_layout("gpt-oss-120b"),
        find_layout("qwen3-next-80b"),
    ],
    ids=lambda layout: layout.name,
)
def test_where_only_one_boundary_is_kept_each_candidate_above_it_costs_one_proof_at_most(layout, share):
    num_tokens = 131_072
    hit = int(num_tokens * share) // layout.alignment * layout.alignment
    held = [
        set(range(num_tokens // group.object_size))
        if group.spec.downward_closed
        else set(group.needed_objects(hit, group.lookahead))
        for group in layout.spec_groups
    ]
    result, store = looked_up(layout, num_tokens, everywhere(layout, held))
    assert result.hit == hit
    top = (num_tokens - max(layout.margin, 1)) // layout.alignment * layout.alignment
    candidates = (top - hit) // layout.alignment
    loaded = sum(len(load) for load in result.loads)
    assert len(store.asked) <= loaded + candidates + 64 * len(layout.spec_groups)


def test_a_miss_costs_a_few_dozen_keys_whatever_the_length():
    layout = find_layout("gpt-oss-120b").with_tp(8)
    for num_tokens in (1_000, 128_000, 1_000_000):
        result, _ = looked_up(layout, num_tokens, everywhere(layout, [set(), set()]))
        assert (result.hit, result.steps) == (0, 1)
        assert sum(result.keys_asked) <= SENTINELS + 1


@pytest.mark.parametrize(("num_tokens", "device_prefix"), [(-1, 0), (10, -1), (10, 11)])
def test_lengths_that_make_no_sense_are_refused(num_tokens, device_prefix):
    with pytest.raises(ConfigError, match="give 0 <= p0 <= N"):
        Lookup(find_layout("llama-3.1-8b"), num_tokens, device_prefix=device_prefix)


def test_nothing_is_loaded_where_the_store_adds_nothing_to_an_unaligned_device_prefix():
    layout = find_layout("gpt-oss-120b").with_object_tokens(256)
    result, _ = looked_up(layout, 1000, everywhere(layout, [set(), set()]), device_prefix=48)
    assert (result.hit, result.loads, sum(result.keys_useful)) == (48, (range(0), range(0)), 0)


@pytest.mark.parametrize("answers", [[True], [True] * 26, [2] * 25, [-1] * 25, [None] * 25, ["1"] * 25, 25])
def test_answers_that_are_no_bools_for_each_object_are_refused(answers):
    search = Lookup(find_layout("llama-3.1-8b"), 16_000)
    ((ask,),) = islice(search.steps(), 1)
    assert len(ask.objects) == 25
    with pytest.raises(StoreError, match="one bool each"):
        search.learn(ask, answers)
    assert search.result().hit == 0


def test_the_junction_reaches_as_far_as_the_matched_run_whatever_the_lookahead():
    groups = (
        CacheGroup(name="f", spec=Full(block_size=16)),
        CacheGroup(name="draft", spec=Full(block_size=16), lookahead=64),
        CacheGroup(name="s", spec=Recurrent(block_size=16)),
    )
    for order in (groups, groups[::-1]):
        layout = Layout(name="m", groups=order)
        held = [set() if g.spec.written_only_at_step_end else set(range(64)) for g in layout.spec_groups]
        result, _ = looked_up(layout, 3_000, everywhere(layout, held))
        assert (result.hit, result.full_run) == (0, 1024)


def test_nothing_is_asked_when_no_candidate_lies_above_the_device():
    layout = find_layout("llama-3.1-8b")
    result, store = looked_up(layout, 64, everywhere(layout, [{0, 1, 2, 3}]), device_prefix=48)
    assert (result.hit, result.steps, store.asked) == (48, 0, set())
    result, _ = looked_up(layout, 1, [[set()]])
    assert (result.hit, result.steps) == (0, 0)


def test_an_early_object_that_the_store_lost_but_the_device_holds_ends_no_run():
    layout = find_layout("llama-3.1-8b")
    result, store = looked_up(layout, 200, everywhere(layout, [set(range(1, 12))]), device_prefix=16)
    assert result.hit == 192
    assert result.loads == (range(1, 12),)
    assert min(i for _, _, i in store.asked) == 1


def test_an_object_that_straddles_the_device_prefix_is_asked_whole():
    layout = Layout(name="m", groups=(CacheGroup(name="f", spec=Full(block_size=16), blocks_per_object=4),))
    result, _ = looked_up(layout, 129, everywhere(layout, [{0, 1}]), device_prefix=48)
    assert (result.hit, result.loads) == (128, (range(2),))


@pytest.mark.parametrize(("num_tokens", "hit"), [(1000, 768), (4000, 3840), (4200, 4096)])
def test_deepseek_v4_with_mtp_saved_by_the_plan_is_resumed_at_its_last_legal_boundary(num_tokens, hit):
    layout = find_layout("deepseek-v4")
    for retention in ("all", 0):
        held = saved_by_plan(layout, retention, num_tokens, num_tokens)
        assert looked_up(layout, num_tokens, everywhere(layout, held))[0].hit == hit


def test_the_full_attention_run_beyond_the_hit_is_the_junction():
    layout = find_layout("gpt-oss-120b")
    result, _ = looked_up(layout, 10_000, everywhere(layout, [set(), set(range(300))]))
    assert (result.hit, result.full_run) == (0, 4800)


def test_other_ranks_are_asked_only_about_what_will_be_loaded():
    layout = find_layout("gpt-oss-120b").with_tp(8)
    held = saved_by_plan(layout, 0, 8_000, 8_000)
    result, store = looked_up(layout, 8_000, everywhere(layout, held))
    assert result.hit == 7_984
    loaded = {(g.index, i) for g, load in zip(layout.spec_groups, result.loads, strict=True) for i in load}
    assert {(g, i) for g, rank, i in store.asked if rank} == loaded


def test_a_rank_hole_is_absent_and_reported():
    layout = find_layout("llama-3.1-8b").with_tp(2)
    everything = set(range(62))
    result, _ = looked_up(layout, 1000, [[everything, everything - {40, 50}]])
    assert result.hit == 640
    assert {(hole.rank, hole.object_idx) for hole in result.rank_holes} == {(1, 40), (1, 50)}


def test_states_alone_are_found_from_the_top_down():
    layout = Layout(name="m", groups=(CacheGroup(name="s", spec=Recurrent(block_size=16)),))
    result, store = looked_up(layout, 16_000, everywhere(layout, [{100}]))
    assert result.hit == 1616
    assert result.full_run == 0
    assert len(store.asked) <= 1 + (16_000 - 1616) // 16 + PROOFS


def test_unfinished_searches_tell_what_is_proven():
    layout = find_layout("llama-3.1-8b")
    search = Lookup(layout, 3_200)
    for asks in search.steps():
        for ask in asks:
            if len(ask.objects) > 100:
                first, *_ = ask.split(100)
                search.learn(first, [True] * 100)
                break
            search.learn(ask, [True] * len(ask.objects))
        else:
            continue
        break
    result = search.result()
    assert 100 * 16 <= result.hit < 3_184
    assert result.loads == (range(result.hit // 16),)


def test_with_several_ranks_only_what_every_rank_answered_is_proven():
    layout = find_layout("llama-3.1-8b").with_tp(2)
    search = Lookup(layout, 200)
    steps = search.steps()
    for ask in next(steps):
        search.learn(ask, [True] * len(ask.objects))
    assert search.result().hit == 0
    for ask in next(steps):
        search.learn(ask.split(5)[0], [True] * 5)
    assert search.result().hit == 80


def test_what_was_found_absent_earlier_still_counts_after_a_descent():
    # Tails of two objects, held at 1, 3 and 5 only: each candidate lacks its other object.
    layout = Layout(name="m", groups=(CacheGroup(name="w", spec=SlidingWindow(block_size=12, window=14)),))
    for held in ({0, 2, 4, 6}, {1, 3, 5, 7}, {0, 3, 5}, {0, 2, 3, 5, 7}):
        result, _ = looked_up(layout, 109, everywhere(layout, [held]))
        pairs = [i for i in range(1, 9) if {i - 1, i} <= held]
        assert result.hit == max([*(12 * (i + 1) for i in pairs), 12 if 0 in held else 0])


def test_asks_split_into_pieces():
    ask = Ask(spec_group=1, rank=2, objects=np.arange(10))
    pieces = ask.split(4)
    assert [piece.objects.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert [len(piece.objects) for piece in ask.split(10)] == [10, 0]
    assert {(piece.spec_group, piece.rank) for piece in pieces} == {(1, 2)}


def test_a_long_fork_takes_one_proof_for_each_candidate_at_most():
    layout = Layout(
        name="m",
        groups=(
            CacheGroup(name="f", spec=Full(block_size=64)),
            CacheGroup(name="w", spec=SlidingWindow(block_size=16, window=32)),
            CacheGroup(name="v", spec=SlidingWindow(block_size=16, window=200)),
        ),
    )
    num_full, rng = 2_000, random.Random(3)
    boundary = 64 * rng.randint(100, 200)
    held = [set(range(num_full)), *(set(range(boundary // 16)) for _ in range(2))]
    result, store = looked_up(layout, 64 * num_full + 1, everywhere(layout, held))
    assert result.hit == boundary
    probes = len(store.asked) - sum(len(load) for load in result.loads)
    assert probes <= (64 * num_full - boundary) // 64 + 64
