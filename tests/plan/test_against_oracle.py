"""Planner and brute-force oracle agree on layouts that no file of cases has."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.plan.boundaries import kept_boundaries, largest_candidate, resend_boundary
from hybridkv.plan.load import plan_load
from hybridkv.plan.presence import longest_hit, lookup_masks
from hybridkv.plan.save import plan_save
from tests.plan import oracle
from tests.plan.strategies import layouts, retentions

LENGTHS = st.integers(1, 400)


def _chosen(mask, count):
    return set(range(count)) if mask is None else set(np.flatnonzero(mask).tolist())


def _saved(layout, retention, num_tokens, junction=0, cuts=()):
    """Objects saved per group when the prompt is prefilled with these cuts."""
    found = [set() for _ in layout.spec_groups]
    edges = sorted({0, num_tokens, *(cut for cut in cuts if cut < num_tokens)})
    for start, stop in pairwise(edges):
        plans = plan_save(
            layout, retention=retention, start=start, stop=stop, num_tokens=num_tokens, junction=junction
        )
        for objects, plan in zip(found, plans, strict=True):
            new = set(plan.indices().tolist())
            assert not objects & new, "an object is planned by one step only"
            objects.update(new)
    return found


def _present(layout, num_tokens, held):
    arrays = []
    for group, objects in zip(layout.spec_groups, held, strict=True):
        array = np.zeros(num_tokens // group.object_size, dtype=bool)
        array[[i for i in objects if i < len(array)]] = True
        arrays.append(array)
    return arrays


def _assert_resumes_at(boundary, hit, layout):
    if any(group.spec.downward_closed for group in layout.spec_groups):
        assert hit == boundary
    else:  # windows and chunks alone may need nothing at a later boundary
        assert hit >= boundary


@given(layouts(), st.data(), LENGTHS)
def test_boundaries_and_saves_equal_the_oracles(made, data, num_tokens):
    layout, groups = made
    retention = data.draw(retentions(layout.alignment))
    junction = data.draw(st.integers(0, 450))
    cuts = data.draw(st.lists(st.integers(1, 400), max_size=4))
    kept = kept_boundaries(layout, retention, num_tokens, junction=junction).tolist()
    assert kept == oracle.kept(groups, retention, num_tokens, junction)
    wanted = oracle.saved(groups, retention, num_tokens, junction)
    assert _saved(layout, retention, num_tokens, junction) == wanted
    assert _saved(layout, retention, num_tokens, junction, cuts) == wanted


@given(layouts(), LENGTHS)
def test_lookup_masks_are_the_union_over_all_candidates(made, num_tokens):
    layout, groups = made
    possible = [b for b in oracle.candidates(groups, num_tokens) if b < num_tokens]
    for group, plain, mask in zip(layout.spec_groups, groups, lookup_masks(layout, num_tokens), strict=True):
        count = num_tokens // group.object_size
        wanted = set().union(*(oracle.objects(plain, b, plain["lookahead"]) for b in possible))
        # None also stands for "no object at all".
        assert _chosen(mask, count) == wanted or count == 0


@given(layouts(), LENGTHS, st.data())
def test_the_hit_is_the_oracles_for_any_presence(made, num_tokens, data):
    layout, groups = made
    absent_share = data.draw(st.sampled_from([0, 1, 3, 9]))
    rng = data.draw(st.randoms(use_true_random=False))
    held = [
        {i for i in range(num_tokens // group.object_size) if rng.randrange(10) >= absent_share}
        for group in layout.spec_groups
    ]
    present = _present(layout, num_tokens, held)
    assert longest_hit(layout, num_tokens, present) == oracle.hit(groups, num_tokens, held)


@given(layouts(), st.data())
def test_what_a_smaller_prefix_needs_covers_what_a_larger_one_needs_below_it(made, data):
    layout, groups = made
    small, large = sorted(data.draw(st.tuples(st.integers(1, 30), st.integers(1, 30))))
    prefix, boundary = small * layout.alignment, large * layout.alignment
    for group, plain in zip(layout.spec_groups, groups, strict=True):
        below = set(range(prefix))
        assert set(group.spec.needed(boundary)) & below <= oracle.needs(plain, prefix, 0)
        objects_below = set(range(prefix // group.object_size))
        assert set(group.needed_objects(boundary, 0)) & objects_below <= set(group.needed_objects(prefix, 0))


@given(layouts(), st.data())
def test_a_load_is_the_need_less_what_the_device_holds(made, data):
    layout, groups = made
    boundary = data.draw(st.integers(0, 20)) * layout.alignment
    device = data.draw(st.integers(0, boundary))
    for group, plain, load in zip(
        layout.spec_groups, groups, plan_load(layout, boundary, device_prefix=device), strict=True
    ):
        on_device = {i for i in range(boundary) if (i + 1) * group.object_size <= device}
        assert set(load) == oracle.objects(plain, boundary, 0) - on_device


@given(layouts(), st.data(), LENGTHS)
def test_a_saved_prompt_is_hit_where_its_kept_boundaries_allow(made, data, num_tokens):
    layout, groups = made
    retention = data.draw(retentions(layout.alignment))
    cuts = data.draw(st.lists(st.integers(1, 400), max_size=3))
    held = _saved(layout, retention, num_tokens, cuts=cuts)

    def hit(length, shared):
        usable = [
            {i for i in objects if (i + 1) * group.object_size <= shared}
            for group, objects in zip(layout.spec_groups, held, strict=True)
        ]
        return longest_hit(layout, length, _present(layout, length, usable))

    _assert_resumes_at(resend_boundary(layout, num_tokens), hit(num_tokens, num_tokens), layout)
    longer = num_tokens + data.draw(st.integers(1, 100))
    _assert_resumes_at(largest_candidate(layout, num_tokens), hit(longer, num_tokens), layout)
    shared = data.draw(st.integers(0, num_tokens))
    within = max((b for b in oracle.candidates(groups, shared) if b < num_tokens), default=0)
    kept = [b for b in oracle.kept(groups, retention, num_tokens) if b <= within]
    assert hit(num_tokens, shared) >= max(kept, default=0)
    if retention == "all":
        _assert_resumes_at(within, hit(num_tokens, shared), layout)


@given(layouts(), st.data(), LENGTHS)
def test_a_known_junction_is_hit_by_the_next_prompt_that_branches_there(made, data, num_tokens):
    layout, groups = made
    shared = data.draw(st.integers(0, num_tokens))
    held = _saved(layout, 0, num_tokens, junction=shared)
    usable = [
        {i for i in objects if (i + 1) * group.object_size <= shared}
        for group, objects in zip(layout.spec_groups, held, strict=True)
    ]
    longer = num_tokens + layout.alignment
    hit = longest_hit(layout, longer, _present(layout, longer, usable))
    _assert_resumes_at(max(oracle.candidates(groups, shared), default=0), hit, layout)


@given(layouts(), st.data())
def test_an_open_ended_save_keeps_every_multiple_of_the_retention(made, data):
    layout, groups = made
    retention = data.draw(retentions(layout.alignment))
    stop = data.draw(st.integers(1, 300))
    plans = plan_save(layout, retention=retention, start=0, stop=stop, num_tokens=None)
    step = layout.alignment if retention == "all" else retention
    far = range(step, stop + 60 + 2 * layout.alignment + step, step) if step else ()
    for group, plain, plan in zip(layout.spec_groups, groups, plans, strict=True):
        complete = set(range(stop // group.object_size))
        wanted = set().union(*(oracle.objects(plain, b, plain["lookahead"]) for b in far))
        assert set(plan.indices().tolist()) == (complete if plain["kind"] == "full" else wanted & complete)
