"""The embedded store: many processes of a host share one directory of payloads."""

import builtins
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.stores.base import CheckReport, GetResult, ObjectInfo, PutHint, PutResult, Segments, StoreStats
from hybridkv.stores.batch import check_batch
from hybridkv.stores.eviction import LruStamps, StampPolicy
from hybridkv.stores.gate import Gate
from hybridkv.stores.local.check import check_store
from hybridkv.stores.local.directory import AtPoint, StoreDirectory
from hybridkv.stores.local.geometry import Field
from hybridkv.stores.local.index import Numbers, Words
from hybridkv.stores.local.key_batch import KeyBatch, checksum, key_of
from hybridkv.stores.local.putting import Putting
from hybridkv.stores.local.slots import SlotTable
from hybridkv.stores.regions import Pieces, Region, RegionTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.stores.registry import StoreUri

_open_stores: "weakref.WeakSet[LocalStore]" = weakref.WeakSet()


class LocalStore:
    """Objects in one directory; also ``ListsObjects``, ``ReportsStats`` and ``ChecksItself``.

    Any number of processes and threads may use the directory at once; one that is killed at any moment leaves
    it whole. Each payload has a checksum, verified on every load. A put evicts neither its own keys nor what
    was used since it began. Counts of what was stored and evicted are this store's own, not those of others.

    Args:
        path: the directory; created where it does not exist.
        capacity_bytes: of all slots together, >= 4096, allocated at creation; ``None`` opens an existing
            directory.
        policy: orders eviction; least recently used when ``None``. The same in all processes.
        at_point: called between the steps of each protocol with its name; tests end the process there.

    Raises:
        ConfigError: no capacity for a new directory, not that of an existing one, or no room for it.
        StoreError: the directory cannot be used; it is left as it was.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int | None = None,
        *,
        policy: StampPolicy | None = None,
        at_point: AtPoint = str,
    ) -> None:
        self.path = path
        self._gate, self._regions = Gate(), RegionTable()
        self._directory = StoreDirectory(path, capacity_bytes, at_point)
        try:
            self._table = SlotTable(self._directory, LruStamps() if policy is None else policy, at_point)
            self._putting = Putting(self._directory, self._table, at_point)
            self._arena = self._directory.arena.data
            self._corrupt_objects = 0
            with self._directory.locked():
                self._table.fill_holes()
                self._table.let_time_go_on()
                self._table.reap()
        except BaseException:
            self._directory.close()
            raise
        _open_stores.add(self)

    def register(self, buffer: "Buffer") -> Region:
        """Make a buffer usable for segments; see ``RegionTable.register``."""
        with self._gate.inside():
            return self._regions.register(buffer)

    def unregister(self, region: Region) -> None:
        """Forget a region; see ``RegionTable.unregister``."""
        with self._gate.inside():
            self._regions.unregister(region)

    def contains(self, keys: Sequence[str]) -> builtins.list[bool]:
        """Tell for each key whether its object is stored; takes no lock."""
        check_batch(keys)
        with self._gate.inside():
            if not keys:
                return []
            present: builtins.list[bool] = (self._table.find(KeyBatch.of(keys)).slots >= 0).tolist()
            return present

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> builtins.list[PutResult]:
        """Copy objects in, evicting others where they need room; the lock is not held while copying."""
        check_batch(keys, sources=sources, hints=hints)
        with self._gate.inside():
            pieces = self._regions.resolve(sources)
            return self._putting.put(keys, pieces, hints) if keys else []

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> builtins.list[GetResult]:
        """Copy objects out and make them the most recently used; takes no lock.

        A payload whose checksum fails is discarded. An object that another process evicts during the copy is
        absent.
        """
        check_batch(keys, targets=targets)
        with self._gate.inside():
            pieces = self._regions.resolve(targets)
            return self._get(keys, pieces) if keys else []

    def _get(self, keys: Sequence[str], pieces: Sequence[Pieces]) -> builtins.list[GetResult]:
        table = self._table
        found = table.find(KeyBatch.of(keys))
        sizes = np.fromiter((piece.num_bytes for piece in pieces), dtype=np.uint64, count=len(pieces))
        present = np.flatnonzero(found.slots >= 0)
        slots, heads = found.slots[present], found.heads[present]
        places, slot_bytes = table.places(slots)
        fits = (sizes[present] == heads[:, Field.NUM_BYTES]) & (sizes[present] <= slot_bytes)
        table.served(slots[fits], table.now())
        is_whole = [
            fit and self._load(place, key_hash, expected, pieces[idx])
            for idx, fit, place, key_hash, expected in zip(
                present.tolist(),
                fits.tolist(),
                places.tolist(),
                heads[:, Field.HASH].tolist(),
                heads[:, Field.CHECKSUM].tolist(),
                strict=True,
            )
        ]
        # All that was read so far counts only if the object is still the same; else it was evicted meanwhile.
        is_same = table.is_same(slots, heads)
        results = [GetResult.ABSENT] * len(keys)
        for idx, whole, same in zip(present.tolist(), is_whole, is_same.tolist(), strict=True):
            if same:
                results[idx] = GetResult.OK if whole else GetResult.CORRUPT
        bad = is_same & fits & ~np.array(is_whole, dtype=np.bool_)
        if bad.any():
            self._drop_corrupt(slots[bad], heads[bad])
        return results

    def _load(self, place: int, key_hash: int, expected: int, pieces: Pieces) -> bool:
        """Copy one payload out, unless its checksum fails."""
        payload = self._arena[place : place + pieces.num_bytes]
        # One pass over the slot, however many segments; it also brings the bytes into the cache for the copy.
        if checksum(payload, key_hash) != expected:
            return False
        pieces.scatter(payload)
        return True

    def _drop_corrupt(self, slots: Numbers, heads: Words) -> None:
        """Discard objects whose payload is not what was stored, unless they are gone already."""
        with self._directory.locked():
            bad = slots[self._table.is_same(slots, heads)]
            self._table.discard(bad)
            self._corrupt_objects += len(bad)

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects; absent keys are no error."""
        check_batch(keys)
        with self._gate.inside():
            if not keys:
                return
            batch = KeyBatch.of(list(dict.fromkeys(keys)))
            with self._directory.locked():
                slots = self._table.find(batch).slots
                self._table.discard(slots[slots >= 0])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects, as they were at the call, whose key begins with ``prefix``.

        One whose record is damaged has no key and is left to ``check``.
        """
        with self._gate.inside(), self._directory.locked():
            rows = self._table.records[self._table.published()]
        return (info for info in map(_info, rows) if info is not None and info.key.startswith(prefix))

    def stats(self) -> StoreStats:
        """Return the counts of this moment."""
        with self._gate.inside(), self._directory.locked():
            table = self._table
            published = table.published()
            return StoreStats(
                objects=len(published),
                used_bytes=int(table.records[published, Field.NUM_BYTES].sum()),
                capacity_bytes=table.geometry.capacity_bytes,
                stored_objects=self._putting.stored_objects,
                stored_bytes=self._putting.stored_bytes,
                evicted_objects=table.evicted_objects,
                evicted_bytes=table.evicted_bytes,
                corrupt_objects=self._corrupt_objects,
            )

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify all payloads and the index; see ``check_store``."""
        with self._gate.inside():
            return check_store(self._directory, self._table, fix=fix)

    def close(self) -> None:
        """Wait for the calls in flight and let go of the directory; what is stored stays."""
        if self._gate.close("the local store is closed"):
            _open_stores.discard(self)
            self._directory.close()
            self._regions.clear()
            del self._table, self._putting, self._arena  # and with them the mappings

    def abandon_after_fork(self) -> None:
        """Make a forked child's store unusable: the parent's locks and reservations are not its own."""
        self._gate.break_off(
            "the local store was opened before this process was forked; open it anew in the child"
        )
        self._directory.drop_files()


def _info(record: Words) -> ObjectInfo | None:
    key = key_of(record)
    if key is None:
        return None
    # A wall clock that was set back makes no age negative.
    age_s = max(0, time.time_ns() - int(record[Field.STORED_AT])) / 1e9
    return ObjectInfo(key=key.decode(), num_bytes=int(record[Field.NUM_BYTES]), age_s=age_s)


def _abandon_all() -> None:
    for store in list(_open_stores):
        store.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_all)


def open_local(uri: "StoreUri") -> LocalStore:
    """Open ``local:///path?capacity=64GiB``; an existing directory also without its capacity.

    Raises:
        ConfigError: the URI names no absolute path, a host, an unknown setting or no valid capacity.
        StoreError: the directory cannot be used.
    """
    uri.check_settings("capacity")
    if uri.authority or not uri.path.strip("/") or "\0" in uri.path:
        raise ConfigError(
            "a local store is a directory: write local:///path?capacity=64GiB, with three slashes"
        )
    return LocalStore(Path(uri.path), uri.num_bytes("capacity"))
