"""The public request traces, where they lie beside the checkout: minutes, so marked slow."""

from fractions import Fraction
from pathlib import Path

import pytest

from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.trace import read_trace
from hybridkv.specs.layout_file import catalogue, find_layout

DATA = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not beside this checkout"),
]


@pytest.fixture(scope="module")
def conversation():
    return read_trace(DATA / "conversation_trace.jsonl").requests


def replayed(requests, model, **settings):
    return Replay(ReplaySettings(layout=find_layout(model), **settings)).run(requests)


@pytest.mark.parametrize(("tails", "rate"), [("distinct", 22.7), ("continued", 39.0)])
def test_retention_zero_with_junctions_hits_what_the_traces_page_says(conversation, tails, rate):
    report = replayed(conversation, "gpt-oss-120b", store_uri="memory://", retention=0, tails=tails)
    assert round(100 * report.hit_rate, 1) == rate


def test_what_full_attention_alone_would_hit_is_what_the_traces_page_says(conversation):
    report = replayed(conversation, "gpt-oss-120b", store_uri="memory://?capacity=1GiB", retention=0)
    assert round(100 * report.full_attention_hit_tokens / report.prompt_tokens, 1) == 37.4


@pytest.mark.parametrize("model", catalogue())
def test_the_whole_trace_runs_for_every_model(conversation, model):
    report = replayed(conversation, model, store_uri="memory://?capacity=64GiB", retention=0)
    assert report.requests == 12_031
    assert 0 < report.hit_tokens <= report.unbounded_hit_tokens


def test_an_unbounded_store_hits_what_the_synthetic_trace_shares():
    requests = read_trace(DATA / "synthetic_trace.jsonl").requests
    for model in ("gpt-oss-120b", "deepseek-v4"):
        report = replayed(requests, model, store_uri="memory://")
        assert report.hit_tokens == report.unbounded_hit_tokens > 0


@pytest.mark.parametrize(("limit", "scale", "capacity"), [(300, "1/64", "2GiB"), (20, "1", "8GiB")])
def test_real_bytes_are_verified_and_hits_equal_those_of_sizes_only(conversation, limit, scale, capacity):
    settings = {"store_uri": f"memory://?capacity={capacity}", "payload_scale": Fraction(scale)}
    with_bytes = replayed(conversation[:limit], "gpt-oss-120b", move_bytes=True, **settings)
    sizes_only = replayed(conversation[:limit], "gpt-oss-120b", **settings)
    assert with_bytes.bytes_verified
    assert with_bytes.hit_tokens == sizes_only.hit_tokens
    assert with_bytes.groups == sizes_only.groups
