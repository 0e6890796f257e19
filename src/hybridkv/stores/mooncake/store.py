"""The distributed store: objects in the memory of a Mooncake cluster's storage nodes."""

import atexit
import builtins
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.base import GetResult, ObjectInfo, PutHint, PutResult, Segments, StoreStats
from hybridkv.stores.batch import check_batch
from hybridkv.stores.gate import Gate
from hybridkv.stores.mooncake.client import ABSENT, MISFIT, NO_ROOM, OK, close_all_ending
from hybridkv.stores.mooncake.connection import DRAIN_S, Connection
from hybridkv.stores.mooncake.library import Library, load_library
from hybridkv.stores.mooncake.master import ClusterCounts, Master
from hybridkv.stores.mooncake.parcels import Item
from hybridkv.stores.mooncake.settings import MooncakeSettings, settings_of
from hybridkv.stores.mooncake.transfers import SPOILED, Transfers
from hybridkv.stores.mooncake.values import key_of, name_of
from hybridkv.stores.regions import Region, RegionTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.stores.registry import StoreUri

PAUSES_S = (0.02, 0.05, 0.1)
"""Mooncake evicts in the background: a put that finds no room is tried again after each of these."""
MAX_FETCHES = 3
"""Tries to fetch an object whose bytes were wrong: it may have been removed during the copy."""

_log = logging.getLogger(__name__)
_open_stores: "weakref.WeakSet[MooncakeStore]" = weakref.WeakSet()


class MooncakeStore:
    """Objects in a Mooncake cluster; also ``ListsObjects`` and ``ReportsStats``.

    ``contains`` leases what it finds: for a while (the master's ``--default_kv_lease_ttl``) it is not
    evicted. While the master is away, calls raise ``StoreUnavailableError``, soon without asking it; when it
    is back, so is this store. Listing and counting read the master's HTTP interface and lease nothing.

    Args:
        settings: how to reach the cluster.
        library: Mooncake's classes; loaded when ``None``.
        clock: for pauses; the wait for a call takes real time.

    Raises:
        ConfigError: Mooncake's library, or one that it needs, is missing.
    """

    def __init__(
        self, settings: MooncakeSettings, *, library: Library | None = None, clock: Clock | None = None
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._gate, self._regions = Gate(), RegionTable()
        self._connection = Connection(library or load_library(), settings, self._clock)
        self._transfers = Transfers(self._connection, settings)
        self._master = Master(settings.http)
        self._trailer_bytes = settings.trailer_bytes
        self._counting = threading.Lock()
        self._stored_objects = self._stored_bytes = self._corrupt_objects = 0
        self._counts_before = self._counts_now()
        _open_stores.add(self)

    @property
    def num_rebuilt(self) -> int:
        """Clients of Mooncake that were wedged and replaced."""
        return self._connection.num_rebuilt

    def register(self, buffer: "Buffer") -> Region:
        """Make a buffer usable for segments; see ``RegionTable.register``."""
        with self._gate.inside():
            region = self._regions.register(buffer)
            try:
                self._connection.register(region.address, region.num_bytes)
            except BaseException:
                self._regions.unregister(region)
                raise
            return region

    def unregister(self, region: Region) -> None:
        """Forget a region; see ``RegionTable.unregister``."""
        with self._gate.inside():
            self._regions.unregister(region)
            self._connection.unregister(region.address)

    def contains(self, keys: Sequence[str]) -> builtins.list[bool]:
        """Tell for each key whether its object is stored, and lease those that are.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        check_batch(keys)
        with self._gate.inside():
            return self._connection.are_stored(builtins.list(map(name_of, keys)))

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> builtins.list[PutResult]:
        """Copy objects in; the cluster evicts others when it is nearly full. Hints are not used.

        Raises:
            StoreUnavailableError: nothing was stored: the master or all storage nodes do not answer.
        """
        check_batch(keys, sources=sources, hints=hints)
        with self._gate.inside():
            items = self._items(keys, sources)
            # Mooncake answers a put of a taken name as if it had stored it.
            first = {item.name: idx for idx, item in reversed(builtins.list(enumerate(items)))}
            taken = dict(zip(first, self._connection.are_stored(builtins.list(first)), strict=True))
            new = sorted(idx for name, idx in first.items() if not taken[name])
            results = [PutResult.ALREADY] * len(keys)
            for idx, code in zip(new, self._put([items[idx] for idx in new]), strict=True):
                results[idx] = _PUT_RESULTS.get(code, PutResult.FAILED)
            stored = [
                item.pieces for item, result in zip(items, results, strict=True) if result is PutResult.STORED
            ]
            with self._counting:
                self._stored_objects += len(stored)
                self._stored_bytes += sum(pieces.num_bytes for pieces in stored)
            return results

    def _put(self, items: Sequence[Item]) -> builtins.list[int]:
        """Store objects, those that find no room several times."""
        codes = self._transfers.put(items)
        for pause_s in PAUSES_S:
            refused = [idx for idx, code in enumerate(codes) if code == NO_ROOM]
            if not refused:
                break
            self._clock.sleep(pause_s)
            codes = self._again(codes, refused, items, self._transfers.put)
        return codes

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> builtins.list[GetResult]:
        """Copy objects out; what is not what was stored is discarded.

        Raises:
            StoreUnavailableError: nothing was fetched: the master or all storage nodes do not answer.
        """
        check_batch(keys, targets=targets)
        with self._gate.inside():
            items = self._items(keys, targets)
            codes = self._transfers.get(items)
            for _ in range(MAX_FETCHES - 1):
                spoiled = [idx for idx, code in enumerate(codes) if code == SPOILED]
                if not spoiled:
                    break
                codes = self._again(codes, spoiled, items, self._transfers.get)
            self._drop([item.name for item, code in zip(items, codes, strict=True) if code == SPOILED])
            return [_GET_RESULTS.get(code, GetResult.FAILED) for code in codes]

    @staticmethod
    def _again(
        codes: builtins.list[int],
        idxs: Sequence[int],
        items: Sequence[Item],
        move: Callable[[Sequence[Item]], builtins.list[int]],
    ) -> builtins.list[int]:
        """Return the codes after a further try for some of the objects."""
        codes = builtins.list(codes)
        try:
            for idx, code in zip(idxs, move([items[idx] for idx in idxs]), strict=True):
                codes[idx] = code
        except StoreUnavailableError as error:
            _log.warning("%s", error)
        return codes

    def _drop(self, names: Sequence[str]) -> None:
        """Discard objects that are not what was stored, so that they can be stored anew."""
        if not names:
            return
        with self._counting:
            self._corrupt_objects += len(names)
        try:
            self._connection.remove(names)
        except StoreUnavailableError as error:
            _log.warning("%s", error)

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects, leased or not; absent keys are no error.

        Raises:
            StoreUnavailableError: an object may still be there.
        """
        check_batch(keys)
        with self._gate.inside():
            self._connection.remove(builtins.list(dict.fromkeys(map(name_of, keys))))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects, as they were at the call, whose key begins with ``prefix``; no age is known.

        Raises:
            StoreUnavailableError: the master's HTTP interface does not answer.
        """
        with self._gate.inside():
            names = [name for name in self._master.names() if (key_of(name) or "").startswith(prefix)]
        return self._infos([name for name in names if key_of(name) is not None])

    def _infos(self, names: Sequence[str]) -> Iterator[ObjectInfo]:
        for name, num_bytes in self._master.sizes(names):
            key = key_of(name)
            if key is not None:
                yield ObjectInfo(key=key, num_bytes=num_bytes - self._trailer_bytes)

    def stats(self) -> StoreStats:
        """Return the counts of this moment; evictions are the whole cluster's since this store was opened.

        Lists all objects, which is work for the master.

        Raises:
            StoreUnavailableError: the master's HTTP interface does not answer.
        """
        sizes = [info.num_bytes for info in self.list()]
        with self._gate.inside():
            now, before = self._master.counts(), self._counts_before
        return StoreStats(
            objects=len(sizes),
            used_bytes=sum(sizes),
            capacity_bytes=now.capacity_bytes,
            stored_objects=self._stored_objects,
            stored_bytes=self._stored_bytes,
            # A master that was restarted counts from 0 again.
            evicted_objects=max(0, now.evicted_objects - before.evicted_objects),
            evicted_bytes=max(0, now.evicted_bytes - before.evicted_bytes),
            corrupt_objects=self._corrupt_objects,
        )

    def _counts_now(self) -> ClusterCounts:
        try:
            return self._master.counts()
        except StoreUnavailableError:
            return ClusterCounts(capacity_bytes=0, evicted_objects=0, evicted_bytes=0)

    def close(self) -> None:
        """Wait for the calls in flight, then take the client down: 1 to 2 seconds, more with SSD offload."""
        if self._gate.close("the mooncake store is closed"):
            _open_stores.discard(self)
            self._connection.close()
            self._regions.clear()

    def abandon_after_fork(self) -> None:
        """Make a forked child's store unusable: the library hangs or crashes there."""
        self._gate.break_off(
            "the mooncake store was opened before this process was forked; open it anew in a spawned process"
        )
        self._connection.abandon_after_fork()

    def _items(self, keys: Sequence[str], batch: Sequence[Segments]) -> builtins.list[Item]:
        return [
            Item(key, name_of(key), pieces, segments)
            for key, pieces, segments in zip(keys, self._regions.resolve(batch), batch, strict=True)
        ]


_PUT_RESULTS = {OK: PutResult.STORED, NO_ROOM: PutResult.REFUSED}
_GET_RESULTS = {
    OK: GetResult.OK,
    SPOILED: GetResult.CORRUPT,
    MISFIT: GetResult.CORRUPT,
    **dict.fromkeys(ABSENT, GetResult.ABSENT),
}


def _abandon_all() -> None:
    for store in list(_open_stores):
        store.abandon_after_fork()


def _close_all() -> None:
    """Take clients down before the interpreter goes: their calls would crash in what is left of it."""
    for store in list(_open_stores):
        store.close()
    close_all_ending(DRAIN_S)


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)


def open_mooncake(uri: "StoreUri") -> MooncakeStore:
    """Open ``mooncake://host:port?...``; see ``MooncakeSettings`` for what can be set.

    Raises:
        ConfigError: the URI makes no sense, or Mooncake is not installed.
    """
    return MooncakeStore(settings_of(uri))
