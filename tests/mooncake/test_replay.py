"""Two client processes share one Mooncake store, every loaded object verified."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from hybridkv.sim.generate import generate_trace
from hybridkv.sim.pair import EnginePair
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.trace import read_trace
from hybridkv.specs.layout_file import find_layout
from hybridkv.stores.mooncake.trial import TrialCluster

TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"


def generated(num_requests):
    return list(generate_trace(seed=5, num_sessions=20, num_apps=3))[:num_requests]


def conversation(num_requests):
    return list(read_trace(TRACE, limit=num_requests).requests)


def hits_of_two_clients(tmp_path, make_requests, model, segment_bytes):
    """Return the reports of two clients on a cluster, and of one on metadata alone."""
    settings = ReplaySettings(
        layout=find_layout(model),
        store_uri="memory://",
        payload_scale=Fraction(1, 64),
    )
    expected = Replay(settings).run(make_requests())
    cluster = TrialCluster(tmp_path, num_nodes=2, segment_bytes=segment_bytes)
    try:
        with EnginePair(make_requests) as engines:
            found = engines.replay(replace(settings, store_uri=cluster.uri, move_bytes=True))
    finally:
        cluster.close()
    return found, expected


def check(found, expected):
    assert found.bytes_verified
    assert found.hit_tokens == expected.hit_tokens > 0
    assert found.requests == expected.requests
    assert found.stored_bytes == expected.stored_bytes
    assert found.groups == expected.groups


@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v4"])
def test_two_clients_hit_what_one_would_on_a_generated_chat(tmp_path, model):
    check(*hits_of_two_clients(tmp_path, partial(generated, 40), model, 1 << 30))


@pytest.mark.skipif(not TRACE.exists(), reason="the store is replayed with the public trace where it is")
def test_two_clients_hit_what_one_would_on_the_conversation_trace(tmp_path):
    check(*hits_of_two_clients(tmp_path, partial(conversation, 300), "gpt-oss-120b", 5 << 30))
