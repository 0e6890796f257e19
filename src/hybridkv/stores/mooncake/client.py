"""One client of a Mooncake cluster: called only while it is set up, its answers read strictly.

The library crashes the process when it is called before ``setup`` or after ``close``. Some of its calls
answer absence and failure alike, others truthily where they fail; here only those are used whose answers are
exact.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from hybridkv.errors import StoreError, StoreUnavailableError
from hybridkv.stores.gate import Gate
from hybridkv.stores.mooncake.library import Library
from hybridkv.stores.mooncake.settings import MooncakeSettings
from hybridkv.threads import DaemonThreads

T = TypeVar("T")

OK = 0
NO_ROOM = -200
INVALID = -600
ABSENT = (-702, -703, -704, -707)
"""Not found, not yet whole, or gone before the transfer was over."""
TRANSFER_FAILED = -800
MISFIT = 1 - 2**31
"""Ours: the value has another size than asked for; no byte of the target was touched."""
_NO_ANSWER = (-900, -901)

MAX_CALLS = 4
MAX_SLICES = 256
"""Of one call; with ``MAX_CALLS`` at a time, 1,024: beyond 2,048 the TCP queues lose some or wedge."""
MAX_NAMES = 1000
"""Names of one call about presence: more gain nothing and block for longer."""
_BUFFER_BYTES = 16 * 2**20  # of the library's own, which none of the calls used here needs

Addresses = Sequence[Sequence[int]]
Sizes = Sequence[Sequence[int]]


class TransferFailedError(StoreUnavailableError):
    """Every value of a call failed on its way: the storage nodes are gone, or this client is wedged."""


class Client:
    """A client that was set up; thread-safe.

    Setting up and closing hold the GIL for about 0.1 and 1 to 2 seconds.

    Args:
        library: Mooncake's classes.
        settings: how to reach the cluster.

    Raises:
        StoreUnavailableError: it could not be set up.
    """

    def __init__(self, library: Library, settings: MooncakeSettings) -> None:
        self._library, self._settings = library, settings
        self._gate, self._closing = Gate(), threading.Lock()
        self._down: Future[None] = Future()
        self.failed_transfers = 0
        raw = library.client()
        try:
            code = raw.setup(
                settings.local_hostname(),
                settings.metadata,
                settings.segment_bytes,
                _BUFFER_BYTES,
                settings.protocol,
                settings.device,
                settings.master,
                tenant_id=settings.tenant,
            )
        except OSError as error:
            raise StoreUnavailableError(f"no way to the master at {settings.master}: {error}") from None
        if code != OK:
            raise StoreUnavailableError(f"Mooncake's client of {settings.master} cannot be set up: {code}")
        self._raw = raw
        self._threads = DaemonThreads(MAX_CALLS, "hybridkv-mooncake")

    def submit(self, use: Callable[["Client"], T]) -> Future[T]:
        """Run a call on one of the client's threads.

        Raises:
            StoreClosedError: the client is closed; the future raises it too.
        """
        with self._gate.inside():
            return self._threads.submit(lambda: use(self))

    def are_stored(self, names: Sequence[str]) -> list[bool]:
        """Tell which values are stored; those are leased: for a while they are not evicted.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        with self._gate.inside():
            return [code == 1 for code in self._answers(self._raw.batch_is_exist(list(names)), names)]

    def put(
        self, names: Sequence[str], addresses: Addresses, sizes: Sizes, groups: Sequence[str]
    ) -> list[int]:
        """Store values, each gathered from pieces of memory; return a code for each.

        A name that is taken keeps its value and answers ``OK``.

        Raises:
            StoreUnavailableError: the master does not answer, or no value went through.
        """
        config = self._library.config()
        config.replica_num = self._settings.replicas
        config.group_ids = list(groups)
        with self._gate.inside():
            codes = self._raw.batch_put_from_multi_buffers(list(names), addresses, sizes, config)
        return self._transferred(self._answers(codes, names))

    def get(self, names: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        """Fetch values, each over pieces of memory that together have its size; return a code for each.

        Raises:
            StoreUnavailableError: the master does not answer, or no value went through.
        """
        with self._gate.inside():
            answers = self._answers(
                self._raw.batch_get_into_multi_buffers(list(names), addresses, sizes), names
            )
            wanted = [sum(size) for size in sizes]
            codes = [
                OK if answer == size else answer if answer < 0 else MISFIT
                for answer, size in zip(answers, wanted, strict=True)
            ]
            # These codes also answer a size that does not fit.
            unclear = [idx for idx, code in enumerate(codes) if code in {INVALID, TRANSFER_FAILED}]
            stored = self._sizes([names[idx] for idx in unclear]) if unclear else {}
            for idx in unclear:
                if stored.get(names[idx], wanted[idx]) != wanted[idx]:
                    codes[idx] = MISFIT
        return self._transferred(codes)

    def remove(self, names: Sequence[str]) -> None:
        """Remove values whatever leases they have.

        Raises:
            StoreUnavailableError: a value may still be there.
        """
        with self._gate.inside():
            codes = self._answers(self._raw.batch_remove(list(names), force=True), names)
        kept = [code for code in codes if code != OK and code not in ABSENT]
        if kept:
            raise StoreUnavailableError(f"Mooncake could not remove {len(kept)} values: {kept[0]}")

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory usable for transfers.

        Raises:
            StoreError: the library refuses it.
        """
        with self._gate.inside():
            if self._raw.register_buffer(address, num_bytes) != OK:
                raise StoreError(f"Mooncake refuses to register {num_bytes} bytes at {address:#x}")

    def unregister(self, address: int) -> None:
        """Forget memory that no call in flight uses."""
        with self._gate.inside():
            self._raw.unregister_buffer(address)

    def is_healthy(self) -> bool:
        """Tell whether the master answered lately; says nothing about the storage nodes."""
        with self._gate.inside():
            return bool(self._raw.health_check() == OK)

    def close(self, timeout_s: float) -> bool:
        """Wait for the calls in flight, then take the client down; ``False`` where one does not return.

        Such a client is left as it is, to be closed again later: the library crashes when it is closed during
        a call.
        """
        _ending.add(self)
        if self._gate.shut("this client of Mooncake is closed"):
            self._threads.close()
        if not self._gate.wait_empty(timeout_s):
            return False
        with self._closing:
            if not self._down.done():
                self._raw.close()
                self._down.set_result(None)
        _ending.discard(self)
        return True

    def when_over(self, future: Future[T], then: Callable[[], None]) -> None:
        """Do something when the library touches the memory of a submitted call no more.

        A transfer that it gave up, after 60 seconds, stays in its queues, and may still be carried out until
        the client is down. So a client is closed before any of its calls takes that long.
        """

        def after_call(_: Future[T]) -> None:
            if self in _ending:
                self._down.add_done_callback(lambda _: then())
            else:
                then()

        future.add_done_callback(after_call)

    def abandon_after_fork(self) -> None:
        """Never use or destroy this client again: in a forked child either would hang or crash."""
        self._gate.break_off("this client of Mooncake was set up before the process was forked")
        _kept.append(self)

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        found = {}
        for name, replicas in self._raw.batch_get_replica_desc(list(names)).items():
            for replica in replicas:
                if replica.is_memory_replica():
                    found[name] = int(replica.get_memory_descriptor().buffer_descriptor.size)
        return found

    def _answers(self, answers: Sequence[int], names: Sequence[str]) -> list[int]:
        if len(answers) != len(names):
            raise StoreUnavailableError(f"Mooncake gave {len(answers)} answers for {len(names)} names")
        lost = next((code for code in answers if code in _NO_ANSWER), None)
        if lost is not None:
            raise StoreUnavailableError(
                f"the Mooncake master at {self._settings.master} does not answer: {lost}"
            )
        return list(answers)

    def _transferred(self, codes: list[int]) -> list[int]:
        """Count calls in a row that failed as a whole."""
        if not codes or any(code != TRANSFER_FAILED for code in codes):
            self.failed_transfers = 0
            return codes
        with _counting:
            self.failed_transfers += 1
        raise TransferFailedError(
            f"none of {len(codes)} values came through to or from Mooncake's storage nodes"
        )


def close_all_ending(timeout_s: float) -> None:
    """Finish all closing that goes on or gave up; ended during a call of the library, the process crashes."""
    for client in list(_ending):
        client.close(timeout_s)


def _keep_all_ending() -> None:
    _kept.extend(_ending)
    _ending.clear()


_counting = threading.Lock()
_ending: set[Client] = set()
"""Clients whose closing began and is not over."""
_kept: list[Client] = []
"""Clients of a forked child's parent, which must not be destroyed: their destructors take them down."""

os.register_at_fork(after_in_child=_keep_all_ending)
