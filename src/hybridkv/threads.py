"""Worker threads that a hanging store call cannot tie the process to."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from hybridkv.errors import TransferError

T = TypeVar("T")


class DaemonThreads:
    """A few threads that run calls in order and do not keep the interpreter from exiting.

    The executors of the standard library join their threads at exit; a store call that hangs would hold the
    engine's process for as long.

    Args:
        count: threads, >= 1.
        name: begins the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=f"{name}-{idx}", daemon=True) for idx in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call on the next free thread; a cancelled future's call is skipped."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - what ends this thread must not end the waiting one
                future.set_exception(TransferError(f"a call tried to end its thread: {error!r}"))

        self._calls.put(run)
        return future

    def close(self) -> None:
        """Let the threads end after the calls that were submitted; waits for none of them."""
        for _ in self._threads:
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
