"""Hand-worked answers: layouts small enough to follow with a pencil."""

import numpy as np
import pytest

from hybridkv.errors import ConfigError
from hybridkv.plan.boundaries import kept_boundaries
from hybridkv.plan.load import plan_load
from hybridkv.plan.presence import longest_hit
from hybridkv.plan.save import plan_save
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import find_layout
from hybridkv.specs.sliding_window import SlidingWindow


def layout(*specs, lookahead=(0, 0, 0, 0, 0)):
    return Layout(
        name="m",
        groups=tuple(
            CacheGroup(name=str(i), spec=spec, lookahead=ahead)
            for i, (spec, ahead) in enumerate(zip(specs, lookahead, strict=False))
        ),
    )


def full(block_size):
    return Full(block_size=block_size)


def swa(block_size, window):
    return SlidingWindow(block_size=block_size, window=window)


def saved(made, num_tokens, retention="all", start=0, stop=None):
    stop = num_tokens if stop is None else stop
    plans = plan_save(made, retention=retention, start=start, stop=stop, num_tokens=num_tokens)
    return [None if plan.mask is None else plan.indices().tolist() for plan in plans]


def last_of_each(last, period, count):
    return [i for i in range(count) if i % period >= period - last]


def test_a_window_of_one_block_keeps_the_block_below_each_boundary():
    assert saved(layout(full(32), swa(8, 8)), 65) == [None, [3, 7]]


def test_a_window_of_two_blocks_keeps_two():
    assert saved(layout(full(32), swa(8, 16)), 65) == [None, [2, 3, 6, 7]]


def test_five_groups_of_different_blocks_keep_their_tails_below_multiples_of_256():
    made = layout(MLA(block_size=256), swa(64, 128), swa(64, 512), swa(4, 16), swa(8, 64))
    assert saved(made, 513) == [
        None,
        last_of_each(2, 4, 8),
        None,
        last_of_each(4, 64, 128),
        last_of_each(8, 32, 64),
    ]


def test_while_the_end_is_unknown_only_the_retentions_multiples_count():
    assert saved(layout(full(32), swa(8, 8)), None, retention=64, stop=128) == [None, [7, 15]]


def test_a_single_block_can_be_hit():
    made = layout(full(32), swa(8, 8))
    present = [np.zeros(3, dtype=bool), np.zeros(12, dtype=bool)]
    present[0][0] = present[1][3] = True
    assert longest_hit(made, 97, present) == 32


@pytest.mark.parametrize(("num_tokens", "hit"), [(64, 48), (65, 64), (63, 48), (16, 0), (1, 0)])
def test_the_last_token_is_always_computed_again(num_tokens, hit):
    made = layout(full(16))
    assert longest_hit(made, num_tokens, [np.ones(num_tokens // 16, dtype=bool)]) == hit


@pytest.mark.parametrize(("num_tokens", "hit"), [(1000, 768), (4000, 3840), (4200, 4096)])
def test_deepseek_v4_with_mtp_resumes_at_the_last_boundary_whose_lookahead_is_complete(num_tokens, hit):
    made = find_layout("deepseek-v4")
    plans = plan_save(made, retention="all", start=0, stop=num_tokens, num_tokens=num_tokens)
    present = []
    for group, plan in zip(made.spec_groups, plans, strict=True):
        held = np.zeros(num_tokens // group.object_size, dtype=bool)
        held[plan.indices()] = True
        present.append(held)
    assert longest_hit(made, num_tokens, present) == hit


def test_retention_zero_keeps_guard_resend_and_sibling():
    made = layout(full(16), swa(16, 32), lookahead=(0, 16))
    # 16 tokens of lookahead must follow a boundary inside the prompt.
    assert kept_boundaries(made, 0, 128).tolist() == [96, 112]
    assert kept_boundaries(made, 0, 129).tolist() == [96, 112]
    assert kept_boundaries(layout(full(16)), 0, 128).tolist() == [96, 112, 128]
    assert kept_boundaries(made, 0, 129, junction=70).tolist() == [48, 96, 112]
    assert kept_boundaries(made, 48, 129).tolist() == [48, 96, 112]
    assert kept_boundaries(made, "all", 15).tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": 100},
        {"retention": "some"},
        {"start": -1},
        {"start": 70},
        {"stop": 200},
        {"num_tokens": 10},
    ],
)
def test_a_save_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        plan_save(
            layout(full(64)), **{"retention": "all", "start": 0, "stop": 64, "num_tokens": 100, **wrong}
        )


def test_a_step_plans_blocks_that_only_a_later_boundary_needs():
    made = layout(full(64), swa(16, 64))
    assert saved(made, 200, retention=0, start=64, stop=144) == [None, None]
    assert saved(made, 264, retention=0, start=64, stop=144) == [None, [8]]


def test_what_the_device_holds_is_not_loaded():
    made = Layout(name="m", groups=(CacheGroup(name="f", spec=full(16), blocks_per_object=4),))
    assert plan_load(made, 128) == (range(2),)
    assert plan_load(made, 128, device_prefix=48) == (range(2),)
    assert plan_load(made, 128, device_prefix=64) == (range(1, 2),)
    assert plan_load(made, 128, device_prefix=192) == (range(0),)
    assert plan_load(made, 48, device_prefix=48) == (range(0),)
    for wrong in (48, -64):
        with pytest.raises(ConfigError, match=f"hit {wrong}"):
            plan_load(made, wrong)
    assert plan_load(made, 0) == (range(0),)


def test_the_lookahead_is_matched_and_never_loaded():
    made = layout(full(16), swa(16, 32), lookahead=(16, 16))
    assert plan_load(made, 64) == (range(4), range(2, 4))
