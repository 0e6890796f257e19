"""Spares a store that does not answer."""

import threading

from hybridkv.clock import Clock


class Breaker:
    """Tells whether a store is worth calling: not for a while after several failures in a row.

    Args:
        failures_to_open: failures in a row after which calls are refused, >= 1.
        open_s: how long they are then refused, seconds; after it one call is let through as a trial.
        clock: tells the time.
    """

    def __init__(self, failures_to_open: int, open_s: float, clock: Clock) -> None:
        self._failures_to_open, self._open_s, self._clock = failures_to_open, open_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s = 0.0

    def may_call(self) -> bool:
        """Return whether to call now; after the pause, one caller gets through as a trial."""
        with self._lock:
            now_s = self._clock.now_s()
            if now_s < self._open_until_s:
                return False
            if self._failures >= self._failures_to_open:
                self._open_until_s = now_s + self._open_s
            return True

    def note_success(self) -> None:
        """Let everybody through again."""
        with self._lock:
            self._failures, self._open_until_s = 0, 0.0

    def note_failure(self) -> None:
        """Count a failed or late call."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._failures_to_open:
                self._open_until_s = self._clock.now_s() + self._open_s

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now."""
        with self._lock:
            return self._clock.now_s() < self._open_until_s
