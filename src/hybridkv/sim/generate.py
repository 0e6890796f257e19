"""A small seeded generator of chat traffic, in the format of the request traces.

Every distribution is uniform over integers, so that a seed gives the same trace on every platform:

===================  ==========================================================================
applications         each session belongs to one of ``num_apps``, all equally likely
system prompt        600-1,600 tokens, one per application, begins all its prompts
session start        within 5 s per session of the trace
turns                2-6 a session, 2-30 s apart; fewer when the prompt reaches its limit
user message         20-300 tokens; one in four brings a document of 500-2,000 tokens more
output               50-500 tokens
next turn, 75 %      the conversation goes on: last prompt, its output, a new message
next turn, 15 %      a branch: the message of an earlier turn is edited, what followed is dropped
next turn, 10 %      the last prompt is sent again for another output
===================  ==========================================================================
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random

from hybridkv.errors import ConfigError
from hybridkv.sim.trace import TOKENS_PER_ID, TraceRequest

MIN_INPUT_LIMIT = 4096  # the longest first prompt fits: system prompt, message and document


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def generate_trace(
    seed: int, num_sessions: int, *, num_apps: int = 3, max_input_length: int = 8192
) -> tuple[TraceRequest, ...]:
    """Return the requests of interleaved chat sessions, in order of arrival.

    The ids obey the rules of ``read_trace``: two prompts hold equal ids exactly for the 512-token blocks up
    to whose end they are equal, and a new turn gives its predecessor's partial last block a new id.

    Args:
        seed: the same seed and settings give the same trace.
        num_sessions: >= 1; about four requests each.
        num_apps: applications, each with its own system prompt, >= 1.
        max_input_length: a session ends rather than send a longer prompt, in tokens, >= 4096.

    Raises:
        ConfigError: a setting is out of range.
    """
    for name, value, low in (
        ("num_sessions", num_sessions, 1),
        ("num_apps", num_apps, 1),
        ("max_input_length", max_input_length, MIN_INPUT_LIMIT),
    ):
        if value < low:
            raise ConfigError(f"{name} is {value}; give at least {low}")
    rng = Random(seed)  # noqa: S311 - traffic, not secrets
    fresh = count()
    apps = [_system_prompt(rng, fresh) for _ in range(num_apps)]
    arrivals: list[tuple[int, _Turn]] = []
    for _ in range(num_sessions):
        time_ms = rng.randint(0, 5_000 * num_sessions)
        for turn in _session(rng, fresh, rng.choice(apps), max_input_length):
            arrivals.append((time_ms, turn))
            time_ms += rng.randint(2_000, 30_000)
    arrivals.sort(key=lambda arrival: arrival[0])
    return tuple(
        TraceRequest(
            timestamp_ms=float(time_ms),
            input_length=turn.input_length,
            output_length=turn.output_length,
            hash_ids=turn.hash_ids,
            line=line,
        )
        for line, (time_ms, turn) in enumerate(arrivals, start=1)
    )


def _system_prompt(rng: Random, fresh: Iterator[int]) -> _Turn:
    """Return an application's system prompt as a turn that every session begins with and nobody sends."""
    length = rng.randint(600, 1_600)
    return _Turn(input_length=length, output_length=0, hash_ids=tuple(islice(fresh, length // TOKENS_PER_ID)))


def _session(rng: Random, fresh: Iterator[int], system: _Turn, max_input_length: int) -> Iterator[_Turn]:
    history = [system]  # the turns that are still part of the conversation
    for _ in range(rng.randint(2, 6)):
        dice = rng.random()
        if len(history) > 1 and dice < 0.10:
            turn = replace(history.pop(), output_length=_output(rng))
        elif len(history) > 1 and dice < 0.25:
            edited_idx = rng.randrange(1, len(history))
            edited = history[edited_idx]
            del history[edited_idx:]
            base = history[-1]
            turn = _after(rng, fresh, base, equal=base.input_length + base.output_length, ids=edited.hash_ids)
        else:
            base = history[-1]
            turn = _after(rng, fresh, base, equal=base.input_length, ids=base.hash_ids)
        if turn.input_length > max_input_length:
            return
        history.append(turn)
        yield turn


def _after(rng: Random, fresh: Iterator[int], base: _Turn, *, equal: int, ids: tuple[int, ...]) -> _Turn:
    """Return a turn that appends a new user message to ``base`` and its output.

    Args:
        rng: source of all choices.
        fresh: ids never used before.
        base: the turn before.
        equal: leading tokens of the new prompt that ``ids`` describe too.
        ids: ids of a prompt that begins with these tokens; those of complete blocks are kept.
    """
    message = rng.randint(20, 300)
    if rng.random() < 0.25:
        message += rng.randint(500, 2_000)
    length = base.input_length + base.output_length + message
    kept = ids[: equal // TOKENS_PER_ID]
    num_fresh = -(-length // TOKENS_PER_ID) - len(kept)
    return _Turn(input_length=length, output_length=_output(rng), hash_ids=(*kept, *islice(fresh, num_fresh)))


def _output(rng: Random) -> int:
    return rng.randint(50, 500)
