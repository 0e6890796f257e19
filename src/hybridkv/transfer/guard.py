"""Store calls with a deadline, behind a circuit breaker.

A call that outlasts its deadline cannot be stopped; it goes on in its thread, and what it uses (a staging
slot) is given back only when it really returns.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hybridkv.breaker import Breaker
from hybridkv.clock import Clock
from hybridkv.errors import StoreError
from hybridkv.threads import DaemonThreads

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """How patient store calls are.

    Attributes:
        timeout_s: longest wait for one call, > 0.
        failures_to_open: failed or late calls in a row after which calls are refused for a while, >= 1.
        open_s: how long they are then refused, seconds; after it one call is let through as a trial.
    """

    timeout_s: float = 10.0
    failures_to_open: int = 3
    open_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardMetrics:
    """Store calls since the start.

    Attributes:
        calls: that were answered in time.
        seconds: that these took together.
        late: that outlasted their deadline.
        failed: that raised.
        refused: that the breaker did not let through.
        is_open: whether the breaker refuses calls now.
    """

    calls: int
    seconds: float
    late: int
    failed: int
    refused: int
    is_open: bool


class Guard:
    """Runs store calls on threads of its own and waits for each no longer than the deadline.

    Args:
        settings: deadline and breaker.
        num_threads: calls that may run at once; a hanging one occupies its thread.
        clock: for the breaker; the wait for a call takes real time.
    """

    def __init__(self, settings: GuardSettings, *, num_threads: int, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._threads = DaemonThreads(num_threads, "hybridkv-store")
        self._breaker = Breaker(settings.failures_to_open, settings.open_s, clock)
        self._lock = threading.Lock()
        self._counts = {"calls": 0, "late": 0, "failed": 0, "refused": 0}
        self._seconds = 0.0

    def call(self, call: Callable[[], T], give_back: Callable[[], None]) -> T | None:
        """Return what the call returns, or ``None`` when it failed, was late or was refused by the breaker.

        Args:
            call: the store call.
            give_back: returns what the call uses. Runs once, and only where ``None`` is returned: at
                once, or, for a late call, when it has really ended.
        """
        if not self._may_call():
            give_back()
            return None
        future = self._threads.submit(call)
        started_s = self._clock.now_s()
        try:
            answer = future.result(self._settings.timeout_s)
        except TimeoutError:
            self._note(late=True)
            future.cancel()
            future.add_done_callback(lambda _: give_back())
            return None
        except Exception as error:  # noqa: BLE001 - a store's bug must not end the engine either
            _log.log(logging.WARNING if isinstance(error, StoreError) else logging.ERROR, "%r", error)
            self._note(late=False)
            give_back()
            return None
        self._breaker.note_success()
        with self._lock:
            self._counts["calls"] += 1
            self._seconds += self._clock.now_s() - started_s
        return answer

    def metrics(self) -> GuardMetrics:
        """Return what happened since the start."""
        with self._lock:
            return GuardMetrics(
                calls=self._counts["calls"],
                seconds=self._seconds,
                late=self._counts["late"],
                failed=self._counts["failed"],
                refused=self._counts["refused"],
                is_open=self._breaker.is_open,
            )

    def close(self) -> None:
        """End the threads; waits for no hanging call."""
        self._threads.close()

    def _may_call(self) -> bool:
        may_call = self._breaker.may_call()
        with self._lock:
            self._counts["refused"] += not may_call
        return may_call

    def _note(self, *, late: bool) -> None:
        self._breaker.note_failure()
        with self._lock:
            self._counts["late" if late else "failed"] += 1
