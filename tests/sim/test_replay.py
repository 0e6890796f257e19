"""The replay, on traces small enough to count by hand and on generated ones."""

from dataclasses import replace
from fractions import Fraction

import pytest

from hybridkv.errors import ConfigError, CorruptPayloadError
from hybridkv.sim.generate import generate_trace
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.trace import TraceRequest
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import catalogue, find_layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.stores.memory import MemoryStore

WINDOWS = Layout(
    name="windows",
    groups=(
        CacheGroup(name="full", spec=Full(block_size=256), layer_block_bytes=100),
        CacheGroup(name="window", spec=SlidingWindow(block_size=128, window=128), layer_block_bytes=10),
    ),
)
STATES = Layout(
    name="states",
    groups=(
        CacheGroup(name="full", spec=Full(block_size=128), layer_block_bytes=100),
        CacheGroup(name="state", spec=Recurrent(block_size=128), layer_block_bytes=10),
    ),
)


def request(length, *ids):
    return TraceRequest(timestamp_ms=0.0, input_length=length, output_length=1, hash_ids=ids, line=1)


def replayed(requests, **settings):
    settings = {"layout": WINDOWS, "store_uri": "memory://?capacity=1GiB", **settings}
    return Replay(ReplaySettings(**settings)).run(requests)


def counts(report, what):
    return [getattr(group, what) for group in report.groups]


def test_every_number_of_a_small_replay_is_as_counted_by_hand():
    trace = [request(1100, 1, 2, 3), request(1100, 1, 2, 3), request(700, 1, 4), request(100, 9)]
    report = replayed(trace, move_bytes=True)
    # Request 1 of 1,100 tokens: 4 full blocks; window blocks 1, 3, 5, 7 end at the boundaries 256 ... 1024.
    # Request 2 resumes at 1,024 and completes no further block. Request 3 shares 512 tokens and resumes
    # there; its 700 tokens complete window block 4 only, which no boundary needs. Request 4 has no block.
    assert (report.requests, report.prompt_tokens, report.hit_tokens) == (4, 3000, 1024 + 512)
    assert counts(report, "saved_objects") == [4, 4]
    assert counts(report, "saved_bytes") == [400, 40]
    assert counts(report, "loaded_objects") == [4 + 2, 1 + 1]
    assert counts(report, "evicted_objects") == [0, 0]
    assert (report.full_attention_hit_tokens, report.unbounded_hit_tokens) == (1536, 1536)
    assert report.hit_rate == pytest.approx(1536 / 3000)


def test_retention_zero_hits_where_prompts_branch_from_the_second_branch_on():
    trace = [
        request(2600, 1, 2, 3, 4, 5, 6),
        request(2600, 1, 2, 7, 8, 9, 10),
        request(2600, 1, 2, 11, 12, 13, 14),
    ]
    report = replayed(trace, retention=0)
    # Boundaries of each prompt: guard 2304 and resend 2560. Prompt 2 shares 1,024 tokens and hits nothing,
    # but saves that junction; prompt 3 hits it.
    assert report.hit_tokens == 1024
    assert report.unbounded_hit_tokens == 2048


def test_least_recently_used_objects_go_first_and_are_counted_by_group():
    trace = [request(512, 1), request(512, 2), request(512, 1)]
    # One prompt of 512 tokens takes 2 x 100 + 2 x 10 bytes.
    assert replayed(trace, store_uri="memory://?capacity=440").hit_tokens == 256
    report = replayed(trace, store_uri="memory://?capacity=220")
    assert report.hit_tokens == 0
    assert counts(report, "evicted_objects") == [4, 4]
    assert counts(report, "evicted_bytes") == [400, 40]
    tight = replayed(trace, store_uri="memory://?capacity=100")
    assert sum(counts(tight, "refused_objects")) > 0


def test_with_steps_recurrent_states_exist_only_where_a_step_ended():
    trace = [request(1024, 1, 2), request(1024, 1, 3), request(1024, 1, 2)]
    anywhere = replayed(trace, layout=STATES)
    assert (anywhere.hit_tokens, anywhere.states) == (512 + 896, "states at every boundary")
    # Steps of 300 tokens end at 256, 512, 768, 896 (the last boundary below the end) and 1,024.
    stepped = replayed(trace, layout=STATES, prefill_tokens=300)
    assert stepped.states == "states where a step ended"
    assert counts(stepped, "saved_objects") == [8 + 4, 5 + 3]
    assert stepped.hit_tokens == 512 + 896
    one_step = replayed(trace, layout=STATES, prefill_tokens=100_000)
    assert one_step.hit_tokens == 896


def test_a_step_below_the_alignment_still_gets_on():
    report = replayed([request(512, 1)], layout=STATES, prefill_tokens=50)
    assert counts(report, "saved_objects")[0] == 4


@pytest.mark.parametrize("tails", ["distinct", "continued"])
@pytest.mark.parametrize("model", catalogue())
def test_an_unbounded_store_hits_what_the_shared_prefixes_allow(model, tails):
    report = replayed(generate_trace(3, 6), layout=find_layout(model), tails=tails, store_uri="memory://")
    assert report.hit_tokens == report.unbounded_hit_tokens > 0
    assert report.hit_tokens <= report.full_attention_hit_tokens


@pytest.mark.parametrize("model", catalogue())
def test_bytes_and_sizes_give_equal_reports(model):
    trace = generate_trace(5, 4)
    same = {"layout": find_layout(model).with_tp(2), "payload_scale": Fraction(1, 512), "retention": 0}
    same["store_uri"] = f"memory://?capacity={replayed(trace, **same).stored_bytes // 2}"
    with_bytes = replayed(trace, move_bytes=True, **same)
    sizes_only = replayed(trace, **same)
    assert with_bytes.bytes_verified
    assert replace(with_bytes, bytes_verified=False) == sizes_only
    assert sum(counts(sizes_only, "evicted_objects")) > 0


def test_bytes_and_sizes_give_equal_reports_where_a_prompt_does_not_fit_at_once():
    trace = [request(2048, 1, 2, 3, 4), request(2048, 1, 2, 3, 4)]
    same = {"layout": find_layout("llama-3.1-8b"), "store_uri": "memory://?capacity=160MiB"}
    with_bytes, sizes_only = replayed(trace, move_bytes=True, **same), replayed(trace, **same)
    assert replace(with_bytes, bytes_verified=False) == sizes_only
    assert sum(counts(sizes_only, "evicted_objects")) > 0


def test_objects_too_large_to_move_are_refused():
    layout = find_layout("llama-3.1-8b").with_object_tokens(65_536)
    with pytest.raises(ConfigError, match="too large to move"):
        replayed([], layout=layout, move_bytes=True, store_uri="memory://?capacity=1TiB")


def test_objects_of_several_blocks_are_fewer_and_hit_at_their_ends():
    trace = [request(1500, 1, 2, 3), request(1500, 1, 2, 3)]
    packed = replayed(trace, layout=find_layout("llama-3.1-8b").with_object_tokens(256), move_bytes=False)
    assert packed.hit_tokens == 1280
    assert counts(packed, "saved_objects") == [5]


def test_each_rank_keeps_its_own_share():
    report = replayed([request(512, 1), request(512, 1)], layout=find_layout("llama-3.1-8b").with_tp(4))
    assert counts(report, "saved_objects") == [4 * 32]
    assert counts(report, "loaded_objects") == [4 * 31]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store_uri": "memory://?capacity=99"}, "smaller than one object of 100 bytes"),
        ({"prefill_tokens": 0}, "prefill tokens is 0"),
        ({"payload_scale": Fraction(0)}, "payload scale is 0"),
        ({"payload_scale": Fraction(2)}, "payload scale is 2"),
        ({"retention": 100}, "not a multiple of the alignment"),
        ({"store_uri": "nowhere://"}, "unknown store 'nowhere'"),
        ({"store_uri": "memory://", "move_bytes": True}, "needs a bounded store"),
        ({"store_uri": "nowhere://", "move_bytes": True}, "unknown store 'nowhere'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        replayed([], **settings)


def test_a_store_that_loses_what_it_found_ends_the_run(monkeypatch):
    monkeypatch.setattr(MemoryStore, "contains", lambda _self, keys: [True] * len(keys))
    with pytest.raises(CorruptPayloadError, match="found and then answered 'absent'"):
        replayed([request(512, 1)])
