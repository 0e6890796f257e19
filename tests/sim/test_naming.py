"""Names are checked against prompts spelled out token by token, which shares no code with the namer."""

from itertools import count, takewhile
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.sim.naming import NAME_BYTES, UnitNamer
from hybridkv.sim.trace import TraceRequest, read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not here")

TAILS = ["distinct", "continued"]
UNITS = [4, 16, 100, 512, 528, 784, 1024]


def prompt(*hash_ids, length):
    return TraceRequest(timestamp_ms=0, input_length=length, output_length=1, hash_ids=hash_ids, line=1)


def names(blob):
    """The (owner, end) pairs of a blob."""
    numbers = [int.from_bytes(blob[at : at + 8], "big") for at in range(0, len(blob), 8)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def spell_out(requests, tails):
    """The tokens of every prompt: the naive reading of both conventions.

    An id that was met before repeats its tokens. A new one gets tokens never used before, except that with
    continued tails the prompt first copies what it continues.
    """
    fresh = count()
    tokens_of = {}
    prompts = []
    for request in requests:
        continued = []
        if tails == "continued":
            for earlier, tokens in zip(requests, prompts, strict=False):
                full = earlier.hash_ids[: earlier.input_length // 512]
                if (
                    earlier.input_length < request.input_length
                    and request.hash_ids[: len(full)] == full
                    and len(tokens) >= len(continued)
                ):
                    continued = tokens
        prompt = []
        for block in request.hash_ids:
            if block not in tokens_of:
                size = min(512, request.input_length - len(prompt))
                copied = continued[len(prompt) : len(prompt) + size]
                tokens_of[block] = copied + [next(fresh) for _ in range(size - len(copied))]
            prompt = prompt + tokens_of[block]
        prompts.append(prompt)
    return prompts


def num_equal(tokens, other):
    """The length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))


@st.composite
def trace_forests(draw):
    """Requests of a valid trace: prompts are sent again, or branch off after some full ids of another one."""
    rests = st.sampled_from([0, 1, 4, 15, 16, 100, 256, 272, 511]) | st.integers(0, 511)
    fresh = count(draw(st.sampled_from([0, 1, 2**53 - 60])))
    requests = []
    for _ in range(draw(st.integers(2, 12))):
        source = draw(st.sampled_from(requests)) if requests and draw(st.integers(0, 5)) else prompt(length=0)
        if source.hash_ids and draw(st.integers(0, 4)) == 0:
            requests.append(source)
            continue
        full = source.hash_ids[: source.input_length // 512]
        kept = full[: len(full) - draw(st.integers(0, len(full)))]
        length = 512 * (len(kept) + draw(st.integers(0, 2))) + draw(rests)
        if length == 0:
            length = 512
        new = [next(fresh) for _ in range(-(-length // 512) - len(kept))]
        requests.append(prompt(*kept, *new, length=length))
    return requests


@settings(max_examples=300, deadline=None)
@given(trace_forests(), st.sampled_from(TAILS), st.sampled_from(UNITS) | st.integers(1, 1_200))
def test_units_have_equal_names_exactly_when_their_prefixes_are_equal(requests, tails, unit):
    namer = UnitNamer(tails, unit)
    blobs = [namer.name(request).blob for request in requests]
    prefix_ids = {}
    name_of, prefix_of = {}, {}
    for blob, tokens in zip(blobs, spell_out(requests, tails), strict=True):
        assert len(blob) == len(tokens) // unit * NAME_BYTES
        prefix = None
        for end, token in enumerate(tokens, start=1):
            prefix = prefix_ids.setdefault((prefix, token), len(prefix_ids))
            if end % unit == 0:
                at = (end // unit - 1) * NAME_BYTES
                name = blob[at : at + NAME_BYTES]
                assert name_of.setdefault(prefix, name) == name
                assert prefix_of.setdefault(name, prefix) == prefix


@settings(max_examples=300, deadline=None)
@given(trace_forests(), st.sampled_from(TAILS), st.sampled_from(UNITS))
def test_shared_is_the_longest_common_prefix_with_an_earlier_prompt(requests, tails, unit):
    namer = UnitNamer(tails, unit)
    prompts = spell_out(requests, tails)
    for idx, request in enumerate(requests):
        shared = namer.name(request).shared
        assert shared == max((num_equal(prompts[idx], other) for other in prompts[:idx]), default=0)
        if shared % 512 and shared < request.input_length:
            event("continues a tail")


@settings(max_examples=300, deadline=None)
@given(trace_forests(), st.sampled_from(TAILS), st.sampled_from(UNITS))
def test_exactly_the_units_up_to_shared_have_known_names(requests, tails, unit):
    namer = UnitNamer(tails, unit)
    known = set()
    for request in requests:
        named = namer.name(request)
        assert [name in known for name in names(named.blob)] == [
            end <= named.shared for end in range(unit, request.input_length + 1, unit)
        ]
        known |= set(names(named.blob))


def test_a_unit_is_named_by_the_id_that_holds_its_last_token_and_by_its_end():
    blob = UnitNamer("distinct", 256).name(prompt(7, 2**53, length=1_023)).blob
    assert names(blob) == [(7, 256), (7, 512), (2**53, 768)]
    assert blob[:16].hex() == "00000000000000070000000000000100"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (528, [(8, 528), (9, 1_056)]),
        (784, [(8, 784)]),
        (1_024, [(8, 1_024)]),
        (1_200, [(9, 1_200)]),
        (1_201, []),
    ],
)
def test_units_need_not_divide_512(unit, expected):
    assert names(UnitNamer("distinct", unit).name(prompt(7, 8, 9, length=1_200)).blob) == expected


def test_distinct_tails_are_not_shared():
    namer = UnitNamer("distinct", 4)
    namer.name(prompt(7, 8, length=700))
    assert namer.name(prompt(7, 9, length=900)).shared == 512


def test_a_longer_prompt_continues_the_tail_and_owns_the_rest_of_the_block():
    namer = UnitNamer("continued", 100)
    namer.name(prompt(7, 8, length=750))
    named = namer.name(prompt(7, 9, 10, length=1_100))
    assert named.shared == 750
    owners = [7] * 5 + [8] * 2 + [9] * 3 + [10]
    assert names(named.blob) == list(zip(owners, range(100, 1_200, 100), strict=True))


def test_tails_are_continued_transitively():
    namer = UnitNamer("continued", 100)
    for block, length in ((8, 610), (9, 750), (10, 900)):
        named = namer.name(prompt(7, block, length=length))
    assert named.shared == 750
    assert [owner for owner, _ in names(named.blob)] == [7] * 5 + [8, 9, 10, 10]


def test_the_longest_tail_is_continued_and_at_ties_the_latest():
    namer = UnitNamer("continued", 4)
    for block, length in ((2, 700), (3, 600), (4, 700), (2, 700), (5, 650)):
        namer.name(prompt(1, block, length=length))
    assert names(namer.name(prompt(1, 6, length=704)).blob)[-2:] == [(2, 700), (6, 704)]


def test_a_prompt_continues_only_shorter_ones():
    namer = UnitNamer("continued", 4)
    namer.name(prompt(1, 2, length=700))
    assert namer.name(prompt(1, 3, length=700)).shared == 512
    assert namer.name(prompt(1, 4, length=699)).shared == 512
    assert namer.name(prompt(1, 5, length=701)).shared == 700


def test_an_id_that_was_seen_keeps_its_names():
    namer = UnitNamer("continued", 4)
    first = namer.name(prompt(1, 2, 3, length=1_030))
    namer.name(prompt(1, 4, length=700))
    again = namer.name(prompt(1, 2, 5, length=1_040))
    assert again.blob.startswith(first.blob)
    assert again.shared == 1_030
    assert (4, 700) not in names(again.blob)


def test_prompts_without_a_full_id_are_continued_by_every_longer_prompt():
    namer = UnitNamer("continued", 4)
    namer.name(prompt(1, length=100))
    assert namer.name(prompt(2, 3, length=1_000)).shared == 100


def test_a_prompt_that_is_sent_again_shares_every_token():
    for tails in TAILS:
        namer = UnitNamer(tails, 16)
        named = [namer.name(prompt(1, 2, length=515)) for _ in range(2)]
        assert [one.shared for one in named] == [0, 515]
        assert named[0].blob == named[1].blob


@pytest.mark.parametrize(("tails", "unit"), [("distinct", 0), ("continued", -16), ("equal", 16)])
def test_settings_that_make_no_sense_are_refused(tails, unit):
    with pytest.raises(ConfigError, match=r"hash_unit is|tails is 'equal'"):
        UnitNamer(tails, unit)


@needs_data
def test_the_conversation_trace_shares_37_percent_and_more_when_tails_are_continued():
    requests = read_trace(DATA / "conversation_trace.jsonl").requests
    total = sum(request.input_length for request in requests)
    shared = {}
    for tails in TAILS:
        namer = UnitNamer(tails, 512)
        shared[tails] = [namer.name(request).shared for request in requests]
    assert f"{sum(shared['distinct']) / total:.3f}" == "0.374"
    assert all(map(int.__ge__, shared["continued"], shared["distinct"]))


@needs_data
@pytest.mark.parametrize("name", ["conversation_trace", "synthetic_trace"])
@pytest.mark.parametrize("tails", TAILS)
def test_the_public_traces_reuse_exactly_the_names_up_to_shared(name, tails):
    namer = UnitNamer(tails, 528)
    known = set()
    for request in read_trace(DATA / f"{name}.jsonl", limit=2_000).requests:
        named = namer.name(request)
        units = [named.blob[at : at + NAME_BYTES] for at in range(0, len(named.blob), NAME_BYTES)]
        assert [unit in known for unit in units] == [
            end <= named.shared for end in range(528, request.input_length + 1, 528)
        ]
        known.update(units)
