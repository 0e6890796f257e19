"""Time as a parameter, so that deadlines are exact in tests and tests are instant."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic time source."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to, or when somebody sleeps on it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time that was set."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Advance at once instead of blocking."""
        self._now_s += seconds
