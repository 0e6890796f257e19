"""Runs lookups against a store: two calls in flight at most, bounded batches, a deadline.

This is the place where a store that fails or is late becomes a shorter hit: counted and logged, never raised.
"""

import logging
from collections import Counter
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from threading import Lock

from hybridkv.breaker import Breaker
from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import ConfigError, StoreClosedError, StoreError
from hybridkv.keys import KeyScheme
from hybridkv.plan.lookup import Ask, Lookup, LookupResult
from hybridkv.stores.base import Store
from hybridkv.threads import DaemonThreads
from hybridkv.transfer.guard import GuardSettings

MAX_KEYS = 4096
"""Keys in one call at most: beyond it a call gains nothing and only blocks for longer."""
MAX_CALLS = 2
"""Calls that one lookup has in flight at most."""
MAX_RUNS = 4
"""Submitted lookups that run at once."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupMetrics:
    """What all lookups of a driver took together.

    Attributes:
        endings: how many ended in which way.
        keys_asked: all ranks together.
        keys_useful: those of them that were then to be loaded.
        calls: store calls that were sent.
        seconds: that the lookups took.
    """

    endings: dict[Ending, int]
    keys_asked: int
    keys_useful: int
    calls: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Run:
    """One lookup on its way."""

    search: Lookup
    scheme: KeyScheme
    blob: bytes
    deadline_s: float | None
    absent: Collection[str]
    calls: int = 0

    def learn(self, batch: list[Ask], answers: list[bool]) -> None:
        if len(answers) != sum(len(ask.objects) for ask in batch):
            raise StoreError(f"a store gave {len(answers)} answers to another number of keys")
        start = 0
        for ask in batch:
            self.search.learn(ask, answers[start : start + len(ask.objects)])
            start += len(ask.objects)


class LookupDriver:
    """Looks prompts up in a store. Safe to use from several threads.

    Without a deadline, a step of one batch runs on the calling thread. All other batches run on two threads
    that the lookups share: while a store call hangs there, lookups with a deadline end as misses.

    Args:
        store: asked with ``contains``; owned by the caller.
        scheme: makes the keys; its layout is the one that is searched.
        max_keys: keys in one call at most, >= 1.
        clock: tells whether a deadline has passed; a wait for the store takes real time.
        breaker: after how many lookups that failed or were late in a row the store is spared, and for how
            long; meanwhile lookups end at once.
    """

    def __init__(
        self,
        store: Store,
        scheme: KeyScheme,
        *,
        max_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        breaker: GuardSettings | None = None,
    ) -> None:
        if max_keys < 1:
            raise ConfigError(f"max_keys is {max_keys}; give at least 1")
        self._store, self._scheme, self._max_keys = store, scheme, max_keys
        self._clock = MonotonicClock() if clock is None else clock
        breaker = breaker or GuardSettings()
        self._breaker = Breaker(breaker.failures_to_open, breaker.open_s, self._clock)
        self._threads = DaemonThreads(MAX_CALLS, "hybridkv-lookup")
        self._runners: DaemonThreads | None = None
        self._lock = Lock()
        self._closed = False
        self._endings: Counter[Ending] = Counter()
        self._keys_asked = self._keys_useful = self._calls = 0
        self._seconds = 0.0

    def lookup(
        self,
        num_tokens: int,
        blob: bytes,
        *,
        device_prefix: int = 0,
        timeout_s: float | None = None,
        absent: Collection[str] = (),
    ) -> LookupOutcome:
        """Find the longest legal prefix of a prompt.

        Args:
            num_tokens: N, the prompt's length.
            blob: its block hashes, one a complete hash unit.
            device_prefix: tokens that the device holds.
            timeout_s: when to end with what is proven; ``None`` = never.
            absent: keys to take for absent whatever the store says, in constant time each.

        Raises:
            StoreClosedError: the driver is closed.
        """
        return self._look_up(self._new_run(num_tokens, blob, device_prefix, timeout_s, absent))

    def submit(
        self,
        num_tokens: int,
        blob: bytes,
        *,
        device_prefix: int = 0,
        timeout_s: float | None = None,
        absent: Collection[str] = (),
    ) -> Future[LookupOutcome]:
        """Look a prompt up on another thread, as ``lookup`` does; the time it waits for one counts.

        Raises:
            StoreClosedError: the driver is closed.
        """
        run = self._new_run(num_tokens, blob, device_prefix, timeout_s, absent)
        with self._lock:
            if self._runners is None:
                self._runners = DaemonThreads(MAX_RUNS, "hybridkv-lookup-run")
        return self._runners.submit(partial(self._look_up, run))

    def use(self, scheme: KeyScheme) -> None:
        """Make the keys of later lookups with another scheme of the same layout."""
        self._scheme = scheme

    def _new_run(
        self,
        num_tokens: int,
        blob: bytes,
        device_prefix: int,
        timeout_s: float | None,
        absent: Collection[str],
    ) -> _Run:
        if self._closed:
            raise StoreClosedError("the lookup driver is closed")
        return _Run(
            search=Lookup(self._scheme.layout, num_tokens, device_prefix=device_prefix),
            scheme=self._scheme,
            blob=blob,
            deadline_s=None if timeout_s is None else self._clock.now_s() + timeout_s,
            absent=absent,
        )

    def _look_up(self, run: _Run) -> LookupOutcome:
        started_s = self._clock.now_s()
        ending = self._run(run) if self._breaker.may_call() else Ending.FAILED
        outcome = LookupOutcome(result=run.search.result(), ending=ending, calls=run.calls)
        with self._lock:
            self._endings[ending] += 1
            self._keys_asked += sum(outcome.result.keys_asked)
            self._keys_useful += sum(outcome.result.keys_useful)
            self._calls += run.calls
            self._seconds += self._clock.now_s() - started_s
        return outcome

    def metrics(self) -> LookupMetrics:
        """Return what all lookups took together."""
        with self._lock:
            return LookupMetrics(
                endings=dict(self._endings),
                keys_asked=self._keys_asked,
                keys_useful=self._keys_useful,
                calls=self._calls,
                seconds=self._seconds,
            )

    def close(self) -> None:
        """End the threads, once no lookup runs; waits for no hanging call. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._threads.close()
            if self._runners is not None:
                self._runners.close()

    def _run(self, run: _Run) -> Ending:
        try:
            for asks in run.search.steps():
                if not self._send(run, _batches(asks, self._max_keys)):
                    self._breaker.note_failure()
                    return Ending.DEADLINE
        except Exception as error:  # noqa: BLE001 - a store's bug must not end the engine either
            level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
            _log.log(level, "a lookup ended early: %r", error)
            self._breaker.note_failure()
            return Ending.FAILED
        self._breaker.note_success()
        return Ending.EXACT

    def _send(self, run: _Run, batches: list[list[Ask]]) -> bool:
        """Send the batches of a step and learn the answers; return whether all came in time."""
        if len(batches) == 1 and run.deadline_s is None:
            run.calls += 1
            run.learn(batches[0], self._call(run, batches[0]))
            return True
        waiting, flying = iter(batches), dict[Future[list[bool]], list[Ask]]()
        try:
            while True:
                left_s = None if run.deadline_s is None else run.deadline_s - self._clock.now_s()
                late = left_s is not None and left_s <= 0
                for batch in () if late else islice(waiting, MAX_CALLS - len(flying)):
                    run.calls += 1
                    flying[self._threads.submit(partial(self._call, run, batch))] = batch
                if not flying:
                    return next(waiting, None) is None
                done, _ = wait(flying, timeout=left_s, return_when=FIRST_COMPLETED)
                if not done:
                    return False
                for future in done:
                    run.learn(flying.pop(future), future.result())
        finally:
            for future in flying:
                future.cancel()

    def _call(self, run: _Run, batch: list[Ask]) -> list[bool]:
        keys: list[str] = []
        for ask in batch:
            keys += run.scheme.keys(ask.spec_group, ask.rank, ask.objects, run.blob)
        answers = self._store.contains(keys)
        if run.absent:
            return [known and key not in run.absent for key, known in zip(keys, answers, strict=True)]
        return answers


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
