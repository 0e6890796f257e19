"""Request traces in the FAST'25 format, read with every rule checked that a replay relies on.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``,
one id per 512 tokens of input, where the last id may cover fewer. Source: Mooncake, "Trading More Storage
for Less Computation" (FAST'25), and the traces published with it.

Equal ids mean equal prefixes, so the ids of a trace form a forest::

    id      one parent (the id before it; none for the first) and so one position
    full    covers 512 tokens wherever it stands
    partial stands last in its prompt, always covers the same number of tokens, has no children
"""

import codecs
import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hybridkv.errors import ConfigError, TraceError

TOKENS_PER_ID = 512
MAX_INPUT_LENGTH = 2**24  # 16M tokens: far above any prompt, and a prompt's names still fit in memory
MAX_NUMBER = 2**53  # every integer up to here is exact in JSON readers that use doubles
MAX_LINE_BYTES = 2**24
MAX_SKIP_REASONS = 5

NO_PARENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: arrival, finite, >= 0; requests may share one.
        input_length: prompt tokens, >= 1.
        output_length: generated tokens, >= 0; they have no ids.
        hash_ids: one id per 512 prompt tokens, the last for what remains; each in [0, 2**53].
        line: where the request stands in its trace, from 1; blank and skipped lines count.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a trace in file order, and what was skipped on the way.

    Attributes:
        requests: at least one.
        num_skipped: lines left out because they were wrong; blank lines do not count.
        skip_reasons: ``FILE:LINE: reason`` of the first few of them.
    """

    requests: tuple[TraceRequest, ...]
    num_skipped: int = 0
    skip_reasons: tuple[str, ...] = ()


def read_trace(path: Path | str, *, limit: int | None = None, skip_bad: bool = False) -> Trace:
    """Return the requests of a JSONL trace.

    A UTF-8 byte order mark, CRLF, blank lines and unknown fields are accepted.

    Args:
        path: the trace; a pipe works too, since it is read once from front to back.
        limit: stop after this many requests, >= 1; what follows is not looked at.
        skip_bad: leave wrong lines out and count them, instead of refusing the trace. A skipped line says
            nothing about its ids.

    Raises:
        ConfigError: ``limit`` is below 1.
        TraceError: the file cannot be read or holds no valid request; a line is wrong (unless ``skip_bad``)
            or longer than 16 MiB. The message reads ``FILE:LINE: reason``, or ``FILE: reason`` where no
            line is to blame.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; give at least 1 request, or None for all")
    requests: list[TraceRequest] = []
    reasons: list[str] = []
    num_skipped = 0
    forest = _Forest()
    with closing(_lines(path)) as lines:
        for line, raw in lines:
            try:
                request = _parse(raw, line)
                forest.add(request)
            except TraceError as error:
                reason = f"{path}:{line}: {error}"
                if not skip_bad:
                    raise TraceError(reason) from None
                if num_skipped < MAX_SKIP_REASONS:
                    reasons.append(reason)
                num_skipped += 1
                continue
            requests.append(request)
            if len(requests) == limit:
                break
    if not requests:
        first = f"; {num_skipped} lines are wrong, the first: {reasons[0]}" if reasons else ""
        raise TraceError(f"{path}: holds no valid request{first}")
    return Trace(requests=tuple(requests), num_skipped=num_skipped, skip_reasons=tuple(reasons))


class _Forest:
    """The ids of the requests so far: what each follows and how many tokens it covers."""

    def __init__(self) -> None:
        # id -> its parent, the tokens it covers, the line of its first use
        self._known: dict[int, tuple[int, int, int]] = {}

    def add(self, request: TraceRequest) -> None:
        """Take the ids of one request, or raise TraceError and take none of them.

        The position needs no check of its own: equal parents stand at equal positions, down to the first id.
        """
        ids = request.hash_ids
        tokens = [TOKENS_PER_ID] * (len(ids) - 1)
        tokens.append(request.input_length - TOKENS_PER_ID * len(tokens))
        fresh: dict[int, tuple[int, int, int]] = {}
        for block, parent, covered in zip(ids, (NO_PARENT, *ids), tokens, strict=False):
            known = self._known.get(block)
            if known is None:
                fresh[block] = (parent, covered, request.line)
            elif known[:2] != (parent, covered):
                _refuse_id(block, parent=parent, covered=covered, known=known)
        self._known |= fresh


def _refuse_id(block: int, *, parent: int, covered: int, known: tuple[int, int, int]) -> NoReturn:
    known_parent, known_covered, line = known
    if parent != known_parent:
        here, there = ("stands first" if p == NO_PARENT else f"follows {p}" for p in (parent, known_parent))
        raise TraceError(
            f"hash id {block} {here} here but {there} on line {line}; an id has one parent and position"
        )
    raise TraceError(
        f"hash id {block} covers {covered} tokens here but {known_covered} on line {line}; "
        "a partial last id is reused only by prompts of the same length"
    )


def _lines(path: Path | str) -> Generator[tuple[int, bytes], None, None]:
    """Yield the number and the bytes of each line that is not blank."""
    for line, raw in enumerate(_raw_lines(path), start=1):
        if len(raw) > MAX_LINE_BYTES:
            raise TraceError(f"{path}:{line}: the line is longer than {MAX_LINE_BYTES} bytes")
        text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
        if text.strip():
            yield line, text


def _raw_lines(path: Path | str) -> Generator[bytes, None, None]:
    try:
        with Path(path).open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                yield raw
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(raw: bytes, line: int) -> TraceRequest:
    """Return the request that one line describes; its ids are not compared with other lines."""
    fields = _decode(raw)
    input_length = _count(fields, "input_length", low=1, high=MAX_INPUT_LENGTH)
    return TraceRequest(
        timestamp_ms=_timestamp_ms(fields),
        input_length=input_length,
        output_length=_count(fields, "output_length", low=0, high=MAX_NUMBER),
        hash_ids=_hash_ids(fields, num_ids=-(-input_length // TOKENS_PER_ID)),
        line=line,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(raw: bytes) -> dict[str, object]:
    try:
        value: object = _DECODER.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise TraceError("not JSON that can be read: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # NaN, Infinity, an integer of thousands of digits
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"not a JSON object but {_shown(value)}")
    return value


def _field(fields: dict[str, object], name: str) -> object:
    if name not in fields:
        raise TraceError(f"{name} is missing")
    return fields[name]


def _count(fields: dict[str, object], name: str, *, low: int, high: int) -> int:
    value = _field(fields, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TraceError(f"{name} is {_shown(value)}, not an integer in [{low}, {high}]")
    return value


def _timestamp_ms(fields: dict[str, object]) -> float:
    value = _field(fields, "timestamp")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise TraceError(f"timestamp is {_shown(value)}, not a number of milliseconds in [0, {MAX_NUMBER}]")
    return float(value)


def _hash_ids(fields: dict[str, object], *, num_ids: int) -> tuple[int, ...]:
    ids = _field(fields, "hash_ids")
    if not isinstance(ids, list):
        raise TraceError(f"hash_ids is {_shown(ids)}, not a list")
    if len(ids) != num_ids:
        raise TraceError(
            f"hash_ids holds {len(ids)} ids, not {num_ids}: one per {TOKENS_PER_ID} tokens of input"
        )
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_NUMBER:
        raise TraceError(f"hash_ids holds something else than integers in [0, {MAX_NUMBER}]")
    if len(set(ids)) != len(ids):
        raise TraceError("hash_ids holds an id twice")
    return tuple(ids)


def _shown(value: object) -> str:
    """Return a short, printable description: numbers and strings by value, the rest by kind."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"{value!a:.40}"
