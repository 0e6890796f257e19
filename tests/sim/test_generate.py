import json
from collections import Counter
from itertools import pairwise

import pytest

from hybridkv.errors import ConfigError
from hybridkv.sim.generate import generate_trace
from hybridkv.sim.naming import UnitNamer
from hybridkv.sim.trace import read_trace

SEEDS = range(10)


def test_the_reader_accepts_every_generated_trace_unchanged(tmp_path):
    path = tmp_path / "trace.jsonl"
    for seed in SEEDS:
        requests = generate_trace(seed, 14)
        with path.open("w") as file:
            for request in requests:
                fields = {
                    "timestamp": request.timestamp_ms,
                    "input_length": request.input_length,
                    "output_length": request.output_length,
                    "hash_ids": request.hash_ids,
                }
                print(json.dumps(fields), file=file)
        assert read_trace(path).requests == requests


def test_a_seed_fixes_the_trace():
    assert generate_trace(3, 8) == generate_trace(3, 8)
    assert generate_trace(3, 8) != generate_trace(4, 8)


def test_a_trace_is_the_same_on_every_platform():
    first, *_, last = generate_trace(0, 14)
    assert (first.timestamp_ms, first.input_length, first.hash_ids) == (18_677, 1_559, (3, 4, 22, 23))
    assert (last.timestamp_ms, last.input_length, last.output_length) == (139_262, 5_342, 487)


def test_twelve_sessions_make_a_demo_of_some_fifty_requests():
    for seed in SEEDS:
        lengths = [request.input_length for request in generate_trace(seed, 12)]
        assert 35 <= len(lengths) <= 65
        assert min(lengths) > 600
        assert max(lengths) <= 8_192


def test_requests_arrive_in_order_of_time():
    for seed in SEEDS:
        times_ms = [request.timestamp_ms for request in generate_trace(seed, 14)]
        assert all(earlier <= later for earlier, later in pairwise(times_ms))


def test_sessions_of_an_application_begin_with_its_system_prompt():
    firsts = Counter(request.hash_ids[0] for request in generate_trace(1, 200, num_apps=4))
    assert len(firsts) == 4
    assert min(firsts.values()) > 50


def test_conversations_go_on_branch_and_are_sent_again():
    requests = generate_trace(2, 200)
    namer = UnitNamer("continued", 16)
    shared = [namer.name(request).shared for request in requests]
    lengths = [request.input_length for request in requests]
    again = sum(map(int.__eq__, shared, lengths))
    goes_on = sum(
        common % 512 != 0 for common, length in zip(shared, lengths, strict=True) if common < length
    )
    children = Counter(
        parent for parent, _ in {pair for request in requests for pair in pairwise(request.hash_ids)}
    )
    assert 0.02 < again / len(requests) < 0.15
    assert goes_on / len(requests) > 0.5
    assert sum(num > 1 for num in children.values()) > 100


def test_a_session_ends_rather_than_exceed_the_longest_prompt():
    requests = generate_trace(5, 100, max_input_length=4_096)
    assert max(request.input_length for request in requests) <= 4_096
    assert len(requests) >= 100


@pytest.mark.parametrize(("sessions", "apps", "longest"), [(0, 3, 8_192), (5, 0, 8_192), (5, 3, 4_095)])
def test_settings_out_of_range_are_refused(sessions, apps, longest):
    with pytest.raises(ConfigError, match="give at least"):
        generate_trace(0, sessions, num_apps=apps, max_input_length=longest)
