"""Runs lookups against a store: at most two calls in flight, bounded batches, a deadline.

This is the place where a store that fails or is late becomes a shorter hit: counted and logged, never raised.
"""

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import StoreError
from hybridkv.keys import KeyScheme
from hybridkv.plan.lookup import Ask, Lookup, LookupResult
from hybridkv.specs.layout import Layout
from hybridkv.stores.base import Store

MAX_KEYS = 4096
"""Keys in one call at most: beyond it a call gains nothing and only blocks for longer."""
MAX_CALLS = 2
"""Calls in flight at most."""

_log = logging.getLogger(__name__)


class Ending(Enum):
    """Why a lookup ended."""

    EXACT = "exact"
    """All that matters was answered."""
    DEADLINE = "deadline"
    """Time ran out; the hit is the best boundary proven until then."""
    FAILED = "failed"
    """The store failed; the hit is the best boundary proven until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutcome:
    """A lookup's result with how it ended.

    Attributes:
        result: hit, loads and telemetry.
        ending: why it ended.
        calls: store calls that were sent.
    """

    result: LookupResult
    ending: Ending
    calls: int


class LookupDriver:
    """Looks prompts up in a store. Safe to use from several threads; they share the calls in flight.

    Without a deadline, a step of one batch runs on the calling thread; all other batches run on two threads.

    Args:
        store: asked with ``contains``; owned by the caller.
        scheme: makes the keys.
        layout: the layout that the scheme was made for.
        max_keys: keys in one call at most, >= 1.
        clock: tells when a deadline has passed.
    """

    def __init__(
        self,
        store: Store,
        scheme: KeyScheme,
        layout: Layout,
        *,
        max_keys: int = MAX_KEYS,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._scheme, self._layout, self._max_keys = store, scheme, layout, max_keys
        self._clock = MonotonicClock() if clock is None else clock
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="hybridkv-lookup")

    def lookup(
        self, num_tokens: int, blob: bytes, *, device_prefix: int = 0, timeout_s: float | None = None
    ) -> LookupOutcome:
        """Find the longest legal prefix of a prompt.

        Args:
            num_tokens: N, the prompt's length.
            blob: its block hashes, one a complete hash unit.
            device_prefix: tokens that the device holds.
            timeout_s: when to end with what is proven; ``None`` = never.
        """
        search = Lookup(self._layout, num_tokens, device_prefix=device_prefix)
        deadline_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        calls, ending = 0, Ending.EXACT
        try:
            for asks in search.steps():
                batches = _batches(asks, self._max_keys)
                calls += len(batches)
                if len(batches) == 1 and deadline_s is None:
                    _learn(search, batches[0], self._call(batches[0], blob))
                elif not self._send(batches, blob, search, deadline_s):
                    ending = Ending.DEADLINE
                    break
        except StoreError as error:
            _log.warning("a lookup ended early: %s", error)
            ending = Ending.FAILED
        return LookupOutcome(result=search.result(), ending=ending, calls=calls)

    def close(self) -> None:
        """End the threads; a call that hangs in the store is left behind. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, batch: list[Ask], blob: bytes) -> list[bool]:
        keys: list[str] = []
        for ask in batch:
            keys += self._scheme.keys(ask.spec_group, ask.rank, ask.objects, blob)
        return self._store.contains(keys)

    def _send(self, batches: list[list[Ask]], blob: bytes, search: Lookup, deadline_s: float | None) -> bool:
        """Send batches and learn their answers as they come; return whether that was done in time."""
        waiting, flying = iter(batches), dict[Future[list[bool]], list[Ask]]()
        try:
            while True:
                left_s = None if deadline_s is None else deadline_s - self._clock.now_s()
                late = left_s is not None and left_s <= 0
                for batch in () if late else islice(waiting, MAX_CALLS - len(flying)):
                    flying[self._threads.submit(self._call, batch, blob)] = batch
                if not flying:
                    return next(waiting, None) is None
                done, _ = wait(flying, timeout=left_s, return_when=FIRST_COMPLETED)
                if not done:
                    return False
                for future in done:
                    _learn(search, flying.pop(future), future.result())
        finally:
            for future in flying:
                future.cancel()


def _batches(asks: list[Ask], most: int) -> list[list[Ask]]:
    """Return the asks of a step as store calls of equal size, each of at most ``most`` keys."""
    total = sum(len(ask.objects) for ask in asks)
    size = -(-total // -(-total // most))
    batches: list[list[Ask]] = []
    room = 0
    for ask in asks:
        rest = ask
        while len(rest.objects):
            if room == 0:
                batches.append([])
                room = size
            piece, rest = rest.split(room)
            batches[-1].append(piece)
            room -= len(piece.objects)
    return batches


def _learn(search: Lookup, batch: list[Ask], answers: list[bool]) -> None:
    start = 0
    for ask in batch:
        search.learn(ask, answers[start : start + len(ask.objects)])
        start += len(ask.objects)
