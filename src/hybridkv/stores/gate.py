"""Lets calls in until the store closes, and closes when the last one is out."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridkv.errors import StoreClosedError


class Gate:
    """Counts the calls that are inside a store."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._num_inside = 0
        self._why_closed = ""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be one of the calls inside.

        Raises:
            StoreClosedError: the gate is closed.
        """
        with self._change:
            if self._why_closed:
                raise StoreClosedError(self._why_closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._change:
                self._num_inside -= 1
                self._change.notify_all()

    def close(self, why: str) -> bool:
        """Let nobody in any more and wait until all are out; ``False`` where it was closed before."""
        if not self.shut(why):
            return False
        self.wait_empty()
        return True

    def shut(self, why: str) -> bool:
        """Let nobody in any more; ``False`` where it was closed before."""
        with self._change:
            if self._why_closed:
                return False
            self._why_closed = why
            return True

    def wait_empty(self, timeout_s: float | None = None) -> bool:
        """Wait until all are out; ``False`` where some are still inside after ``timeout_s`` seconds."""
        with self._change:
            return self._change.wait_for(lambda: not self._num_inside, timeout_s)

    def break_off(self, why: str) -> None:
        """Close without waiting: for a forked child, in which nobody else is inside."""
        self._change = threading.Condition()
        self._why_closed = why
