"""A connection to a Mooncake cluster that outlives its clients: made late, spared, timed, rebuilt."""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import TypeVar

from hybridkv.breaker import Breaker
from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import StoreClosedError, StoreError, StoreUnavailableError
from hybridkv.stores.mooncake.client import MAX_NAMES, Client, TransferFailedError
from hybridkv.stores.mooncake.library import Library
from hybridkv.stores.mooncake.master import Master
from hybridkv.stores.mooncake.settings import MooncakeSettings

T = TypeVar("T")

FAILURES_TO_OPEN = 3
OPEN_S = 5.0
"""After three failures in a row nothing is asked for this long: each failing call costs seconds."""
FAILURES_TO_REBUILD = 3
"""Transfers in a row that failed as a whole, with a healthy master, before a new client is made."""
DRAIN_S = 90.0
"""Longer than any call takes: the library gives up a transfer after 60 s."""
_PROBE_S = 1.0

_log = logging.getLogger(__name__)


class Connection:
    """Runs calls on a client that it sets up when it is first needed and when the one before was wedged.

    Args:
        library: Mooncake's classes.
        settings: how to reach the cluster.
        clock: for the breaker; the wait for a call takes real time.
    """

    def __init__(self, library: Library, settings: MooncakeSettings, clock: Clock | None = None) -> None:
        self._library, self._settings = library, settings
        self._breaker = Breaker(FAILURES_TO_OPEN, OPEN_S, clock or MonotonicClock())
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._memory: dict[int, int] = {}
        self.num_rebuilt = 0
        try:
            self._connected()
        except StoreUnavailableError as error:
            _log.warning("%s; it is tried again when it is needed", error)
            self._breaker.note_failure()

    def start(self, use: Callable[[Client], T]) -> tuple[Client, Future[T]]:
        """Start a call on a thread of the client's.

        Raises:
            StoreUnavailableError: there is no client now, or the cluster is spared.
        """
        if not self._breaker.may_call():
            raise StoreUnavailableError(
                "Mooncake failed several times in a row and is left alone for a while"
            )
        try:
            client = self._connected()
            return client, client.submit(use)
        except StoreUnavailableError:
            self._breaker.note_failure()
            raise
        except StoreClosedError as error:
            raise StoreUnavailableError(str(error)) from None

    def finish(self, client: Client, future: Future[T], *, is_patient: bool = False) -> T:
        """Return the answer of a call that was started.

        Args:
            client: as ``start`` returned it.
            future: as ``start`` returned it.
            is_patient: wait beyond the deadline: the call uses memory of a caller who may reuse it when we
                return. The library itself gives up within a minute, and then its client is taken down.

        Raises:
            StoreUnavailableError: the call failed, or outlasted its deadline and goes on.
        """
        try:
            answer = self._answer(client, future, is_patient=is_patient)
        except StoreClosedError as error:  # it was replaced before the call began
            raise StoreUnavailableError(str(error)) from None
        self._breaker.note_success()
        return answer

    def _answer(self, client: Client, future: Future[T], *, is_patient: bool) -> T:
        try:
            return future.result(self._settings.timeout_s)
        except TimeoutError:
            self._breaker.note_failure()
            self._retire(client, "a call outlasted its deadline")
            if future.cancel() or not is_patient:  # what did not begin touches no memory
                raise StoreUnavailableError(
                    f"Mooncake did not answer within {self._settings.timeout_s:g} s"
                ) from None
            try:
                return future.result()
            finally:
                client.close(DRAIN_S)  # see `Client.when_over`
        except StoreUnavailableError as error:
            self._breaker.note_failure()
            is_wedged = (
                isinstance(error, TransferFailedError) and client.failed_transfers >= FAILURES_TO_REBUILD
            )
            if is_wedged and client.is_healthy():
                self._retire(client, "its transfers fail though the master is healthy")
            raise

    def call(self, use: Callable[[Client], T]) -> T:
        """Return the answer of one call.

        Raises:
            StoreUnavailableError: as ``start`` and ``finish``.
        """
        return self.finish(*self.start(use))

    def are_stored(self, names: Sequence[str]) -> list[bool]:
        """Tell which values are stored; see ``Client.are_stored``."""
        batches = [names[start : start + MAX_NAMES] for start in range(0, len(names), MAX_NAMES)]
        return list(
            chain.from_iterable(
                self.call(lambda client, batch=batch: client.are_stored(batch))  # type: ignore[misc]
                for batch in batches
            )
        )

    def remove(self, names: Sequence[str]) -> None:
        """Remove values; see ``Client.remove``."""
        for start in range(0, len(names), MAX_NAMES):
            batch = names[start : start + MAX_NAMES]
            self.call(lambda client, batch=batch: client.remove(batch))  # type: ignore[misc]

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory usable for transfers of this and every later client.

        Raises:
            StoreError: the library refuses it.
        """
        with self._lock:
            if self._client is not None:
                self._client.register(address, num_bytes)
            self._memory[address] = num_bytes

    def unregister(self, address: int) -> None:
        """Forget memory that no call in flight uses."""
        with self._lock:
            del self._memory[address]
            if self._client is not None:
                self._client.unregister(address)

    def close(self) -> None:
        """Take the client down when its calls are over; one that hangs is left."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None and not client.close(self._settings.timeout_s):
            _log.warning("a call of Mooncake does not return: its client is left open")

    def abandon_after_fork(self) -> None:
        """Never touch the parent's client in a forked child."""
        self._lock = threading.Lock()
        if self._client is not None:
            self._client.abandon_after_fork()

    def _connected(self) -> Client:
        """Return the client, set up anew where there is none."""
        if not self._lock.acquire(timeout=self._settings.timeout_s):
            raise StoreUnavailableError("Mooncake's client is still being set up")
        try:
            if self._client is None:
                self._probe()
                client = Client(self._library, self._settings)
                try:
                    for address, num_bytes in self._memory.items():
                        client.register(address, num_bytes)
                except StoreError as error:
                    client.close(self._settings.timeout_s)
                    raise StoreUnavailableError(str(error)) from None
                self._client = client
            return self._client
        finally:
            self._lock.release()

    def _probe(self) -> None:
        """Find out quickly that nobody answers: setting up would hold the GIL for many seconds.

        Raises:
            StoreUnavailableError: the master is away or frozen.
        """
        if self._settings.has_leaders:
            return
        try:
            socket.create_connection(self._settings.address, timeout=_PROBE_S).close()
        except OSError as error:
            raise StoreUnavailableError(
                f"no Mooncake master at {self._settings.master}: {error.strerror or error}"
            ) from None
        # The kernel takes connections for a frozen process too.
        if Master(self._settings.http).is_frozen(_PROBE_S):
            raise StoreUnavailableError(f"the Mooncake master at {self._settings.master} does not answer")

    def _retire(self, client: Client, why: str) -> None:
        """Let the next call set up a new client; the old one is closed when its calls are over."""
        with self._lock:
            if self._client is not client:
                return
            self._client = None
            self.num_rebuilt += 1
        _log.warning("Mooncake's client is replaced: %s", why)
        threading.Thread(target=client.close, args=(DRAIN_S,), daemon=True).start()
