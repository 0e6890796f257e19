import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, TraceError
from hybridkv.sim.trace import MAX_INPUT_LENGTH, MAX_LINE_BYTES, MAX_SKIP_REASONS, TraceRequest, read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not here")


def entry(hash_ids=(1, 2), input_length=None, **changes):
    """A line's fields; by default the last id covers 88 tokens."""
    length = 512 * len(hash_ids) - 424 if input_length is None else input_length
    return {
        "timestamp": 5, "input_length": length, "output_length": 7, "hash_ids": list(hash_ids)
    } | changes  # fmt: skip


def without(name):
    return {key: value for key, value in entry().items() if key != name}


@pytest.fixture
def write(tmp_path):
    def write(*lines, newline="\n", start=b""):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path = tmp_path / "trace.jsonl"
        path.write_bytes(start + "".join(text + newline for text in texts).encode())
        return path

    return write


def test_a_line_becomes_a_request(write):
    trace = read_trace(write(entry([3, 4], 600, timestamp=2.5)))
    assert trace.requests == (
        TraceRequest(timestamp_ms=2.5, input_length=600, output_length=7, hash_ids=(3, 4), line=1),
    )
    assert (trace.num_skipped, trace.skip_reasons) == (0, ())


def test_the_smallest_and_the_largest_numbers_are_accepted(write):
    path = write(
        entry([0], 1, output_length=0, timestamp=0),
        entry([2**53], 512, output_length=2**53, timestamp=2**53),
        entry(range(5, 5 + MAX_INPUT_LENGTH // 512), MAX_INPUT_LENGTH),
    )
    assert [request.input_length for request in read_trace(path).requests] == [1, 512, MAX_INPUT_LENGTH]


def test_a_byte_order_mark_crlf_blank_lines_and_unknown_fields_are_accepted(write):
    path = write("", entry(), "  ", entry(extra={"a": [None]}), newline="\r\n", start=b"\xef\xbb\xbf")
    trace = read_trace(path)
    assert [request.line for request in trace.requests] == [2, 4]
    assert trace.num_skipped == 0


def test_a_last_line_without_a_newline_is_read(write):
    assert len(read_trace(write(entry(), json.dumps(entry()), newline="\n")).requests) == 2
    assert len(read_trace(write(json.dumps(entry()), newline="")).requests) == 1


def test_the_limit_counts_requests_and_ends_the_reading(write):
    path = write(entry(), "nonsense", entry(), entry(), "nonsense")
    trace = read_trace(path, limit=2, skip_bad=True)
    assert [request.line for request in trace.requests] == [1, 3]
    assert trace.num_skipped == 1


def test_a_limit_below_one_is_refused(write):
    with pytest.raises(ConfigError, match="limit is 0"):
        read_trace(write(entry()), limit=0)


BAD_LINES = {
    "not JSON": ("{'timestamp': 1}", "not JSON: .* at column 2"),
    "two objects": (json.dumps(entry()) * 2, "not JSON: Extra data"),
    "a list": ("[1]", "not a JSON object but a list"),
    "null": ("null", "not a JSON object but None"),
    "deep nesting": ("[" * 200_000, "nested too deeply"),
    "deep nesting in an unknown field": ('{"a":' * 200_000, "nested too deeply"),
    "an endless integer": ('{"timestamp": ' + "9" * 5_000 + "}", "not JSON: Exceeds the limit"),
    "no timestamp": (without("timestamp"), "timestamp is missing"),
    "a negative timestamp": (entry(timestamp=-1), "timestamp is -1"),
    "a timestamp as a string": (entry(timestamp="5"), "timestamp is '5'"),
    "a timestamp as a bool": (entry(timestamp=True), "timestamp is True"),
    "a huge timestamp": (entry(timestamp=10**400), "timestamp is 1000"),
    "NaN": (json.dumps(entry(timestamp=float("nan"))), "NaN is not a JSON number"),
    "Infinity": (json.dumps(entry(timestamp=float("-inf"))), "-Infinity is not a JSON number"),
    "an infinite float": ('{"input_length": 9, "timestamp": 1e999}', "timestamp is inf"),
    "no input length": (without("input_length"), "input_length is missing"),
    "an empty prompt": (entry([], 0), "input_length is 0"),
    "a fraction of a token": (entry([1], 1.0), "input_length is 1.0"),
    "an input length as a bool": (entry([1], input_length=True), "input_length is True"),
    "a huge prompt": (entry([1], MAX_INPUT_LENGTH + 1), "input_length is 16777217"),
    "no output length": (without("output_length"), "output_length is missing"),
    "a negative output": (entry(output_length=-1), "output_length is -1"),
    "a huge output": (entry(output_length=2**53 + 1), "output_length is 9007199254740993"),
    "an object as output length": (entry(output_length={}), "output_length is an object"),
    "no ids": (without("hash_ids"), "hash_ids is missing"),
    "ids as a string": (entry() | {"hash_ids": "12"}, "hash_ids is '12', not a list"),
    "too few ids": (entry([1], 513), "hash_ids holds 1 ids, not 2"),
    "too many ids": (entry([1, 2], 512), "hash_ids holds 2 ids, not 1"),
    "a negative id": (entry([1, -2]), "hash_ids holds something else than integers"),
    "a bool as id": (entry([1, True]), "hash_ids holds something else than integers"),
    "a string as id": (entry([1, "2"]), "hash_ids holds something else than integers"),
    "a list as id": (entry([1, [2]]), "hash_ids holds something else than integers"),
    "a huge id": (entry([2**53 + 1, 2]), "hash_ids holds something else than integers"),
    "an id twice": (entry([1, 2, 1]), "hash_ids holds an id twice"),
}  # fmt: skip
BAD_AFTER = {
    "an id with another parent": (entry([7, 2]), "hash id 2 follows 7 here but follows 1 on line 1"),
    "an id at another position": (entry([2, 1]), "hash id 2 stands first here but follows 1 on line 1"),
    "a first id further back": (entry([9, 1, 5]), "hash id 1 follows 9 here but stands first on line 1"),
    "a shorter partial id": (entry([1, 2], 550), "hash id 2 covers 38 tokens here but 88 on line 1"),
    "a partial id as a full one": (entry([1, 2, 3]), "hash id 2 covers 512 tokens here but 88 on line 1"),
    "a full id as a partial one": (entry([1], 40), "hash id 1 covers 40 tokens here but 512 on line 1"),
}


@pytest.mark.parametrize(("line", "reason"), (BAD_LINES | BAD_AFTER).values(), ids=BAD_LINES | BAD_AFTER)
def test_a_bad_line_is_refused_with_file_line_and_reason(write, line, reason):
    path = write(entry([1, 2]), "", line)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    "line", [line for line, _ in (BAD_LINES | BAD_AFTER).values()], ids=BAD_LINES | BAD_AFTER
)
def test_a_bad_line_can_be_skipped(write, line):
    path = write(entry([1, 2]), line, entry([1, 50]))
    trace = read_trace(path, skip_bad=True)
    assert [request.line for request in trace.requests] == [1, 3]
    assert trace.num_skipped == 1
    assert trace.skip_reasons[0].startswith(f"{path}:2: ")


def test_a_skipped_line_says_nothing_about_its_ids(write):
    path = write(entry([1, 2]), entry([5, 6, 2]), entry([6, 5, 7]))
    assert [request.hash_ids for request in read_trace(path, skip_bad=True).requests] == [(1, 2), (6, 5, 7)]


def test_all_skipped_lines_are_counted_and_the_first_ones_explained(write):
    trace = read_trace(write(entry(), *["nonsense"] * (MAX_SKIP_REASONS + 3)), skip_bad=True)
    assert trace.num_skipped == MAX_SKIP_REASONS + 3
    assert len(trace.skip_reasons) == MAX_SKIP_REASONS


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{\x00}\x00\n", b'{"timestamp": "\xff"}', b"\x1f\x8b\x08\x00\x00", "€\n".encode("cp1252")],
    ids=["UTF-16", "Latin-1", "gzip", "Windows-1252"],
)
def test_a_line_that_is_not_utf8_is_refused(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: not UTF-8 at byte"):
        read_trace(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf"], ids=["empty", "blank", "mark only"]
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_without_requests_is_refused(tmp_path, content, skip_bad):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl: holds no valid request$"):
        read_trace(path, skip_bad=skip_bad)


def test_a_file_of_bad_lines_alone_is_refused_with_the_first_reason(write):
    with pytest.raises(
        TraceError, match=r"holds no valid request; 2 lines are wrong, the first: .*:1: not JSON"
    ):
        read_trace(write("nonsense", "[]"), skip_bad=True)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_path_that_cannot_be_read_is_refused(tmp_path, skip_bad):
    for path in (tmp_path / "absent", tmp_path, tmp_path / "nul\0", "x" * 5_000):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path, skip_bad=skip_bad)


def test_a_path_may_be_a_string(write):
    assert len(read_trace(str(write(entry()))).requests) == 1


@pytest.mark.parametrize("skip_bad", [False, True])
def test_an_endless_line_is_refused_even_when_bad_lines_are_skipped(write, skip_bad):
    path = write(entry(), " " * (MAX_LINE_BYTES + 1))
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: the line is longer than"):
        read_trace(path, skip_bad=skip_bad)


json_values = (
    st.sampled_from([None, True, "5", "\ud800", [], {}, [[]]])
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
)
hostile_entries = st.fixed_dictionaries(
    {},
    optional={
        "timestamp": json_values,
        "input_length": st.integers(-1, 1_100) | json_values,
        "output_length": st.integers(-1, 5) | json_values,
        "hash_ids": st.lists(st.integers(-1, 4), max_size=3) | json_values,
    },
)
hostile_lines = st.binary(max_size=60) | hostile_entries.map(lambda fields: json.dumps(fields).encode())


@settings(deadline=None)
@given(st.lists(hostile_lines, max_size=6), st.booleans())
def test_hostile_input_is_read_or_refused_but_nothing_else(tmp_path_factory, lines, skip_bad):
    path = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    path.write_bytes(b"\n".join(lines))
    requests, refusal = (), str(path)
    try:
        requests = read_trace(path, skip_bad=skip_bad).requests
    except TraceError as error:
        refusal = str(error)
    assert refusal.startswith(str(path))
    assert all(len(request.hash_ids) == -(-request.input_length // 512) for request in requests)


@needs_data
@pytest.mark.parametrize(
    ("name", "num_requests"), [("conversation_trace", 12_031), ("synthetic_trace", 3_993)]
)
def test_the_public_traces_obey_every_rule(name, num_requests):
    trace = read_trace(DATA / f"{name}.jsonl")
    assert len(trace.requests) == num_requests
    assert [request.line for request in trace.requests] == list(range(1, num_requests + 1))
