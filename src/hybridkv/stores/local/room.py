"""Making room: free slots first, then chunks without a class, then the least recently used objects.

Within a size class eviction follows the stamps exactly. Between classes whole chunks move: a chunk whose
typical object is older than the oldest one of the class that needs room is emptied and changes its class, so
that classes which nobody uses any more give their space up.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridkv.stores.local.geometry import Field, HeaderWord
from hybridkv.stores.local.index import Bools, Numbers, Words
from hybridkv.stores.local.slots import RESERVED_STAMP, SlotTable

MIN_CANDIDATES = 64
CANDIDATE_SHARE = 16
"""A scan of a class yields its oldest sixteenth: far cheaper an object than an order kept at every use."""


@dataclass(slots=True)
class _Scan:
    """The oldest slots of a class, oldest first, as one scan saw them.

    Stamps only grow, so those whose stamp is still the same are still the oldest.
    """

    changes: int
    slots: Numbers
    stamps: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a put needs of one size class.

    Attributes:
        slot_bytes: the class.
        count: slots, >= 1.
        before: objects stamped at this moment or later stay: someone may be copying them.
        keep: slots that stay too.
    """

    slot_bytes: int
    count: int
    before: int
    keep: Numbers


class Room:
    """Finds the slots that a put may use. The caller holds the directory's lock.

    Args:
        table: of the store.
        owner: the store's id.
    """

    def __init__(self, table: SlotTable, owner: int) -> None:
        self._table, self._owner = table, owner
        self._scans: dict[int, _Scan] = {}

    def reserve(self, need: Need, taken: list[int]) -> None:
        """Reserve as many of the needed slots as there are, evicting where none is free.

        Args:
            need: of one put and class.
            taken: receives each slot before it is touched, so that the caller can give all back.
        """
        stop = len(taken) + need.count
        is_fresh = False
        while (missing := stop - len(taken)) > 0:
            scan = self._scans.get(need.slot_bytes)
            if scan is None or scan.changes != self._changes():
                scan, is_fresh = self._scan(need), True
            chosen = np.flatnonzero(self._is_eligible(scan, need))[:missing]
            evicted = scan.stamps[chosen][scan.stamps[chosen] > 0]
            if len(chosen) - len(evicted) < missing:
                oldest = int(evicted[0]) if evicted.size else need.before
                if self._add_chunk(need, older_than=oldest if is_fresh else 0):
                    continue
            if chosen.size:
                slots = np.sort(scan.slots[chosen])  # memory is written fastest in its order
                scan.slots, scan.stamps = scan.slots[chosen[-1] + 1 :], scan.stamps[chosen[-1] + 1 :]
                taken.extend(slots.tolist())
                self._table.take(slots)
            elif is_fresh:
                return
            else:
                del self._scans[need.slot_bytes]

    def _changes(self) -> int:
        return int(self._table.header[HeaderWord.CHANGES])

    def _is_eligible(self, scan: _Scan, need: Need) -> Bools:
        table = self._table
        eligible: Bools = (table.stamps[scan.slots] == scan.stamps) & (scan.stamps < need.before)
        eligible &= table.records[scan.slots, Field.OWNER] == 0
        if need.keep.size:
            eligible &= ~np.isin(scan.slots, need.keep)
        return eligible

    def _scan(self, need: Need) -> _Scan:
        """Look at a whole class for its oldest slots; what dead stores hold there is reaped first."""
        table = self._table
        slots = table.class_slots(need.slot_bytes)
        self._reap_reserved(slots[table.stamps[slots] == RESERVED_STAMP])
        scan = self._oldest(slots, need)
        # A late reader's stamp may hide a reservation until it is among the oldest.
        if self._reap_reserved(scan.slots):
            scan = self._oldest(slots, need)
        self._scans[need.slot_bytes] = scan
        return scan

    def _oldest(self, slots: Numbers, need: Need) -> _Scan:
        stamps = self._table.stamps[slots]
        count = min(len(slots), max(MIN_CANDIDATES, need.count, len(slots) // CANDIDATE_SHARE))
        oldest = np.argpartition(stamps, count - 1)[:count] if count else slots
        oldest = oldest[np.argsort(stamps[oldest], kind="stable")]
        oldest = oldest[stamps[oldest] < RESERVED_STAMP]
        return _Scan(self._changes(), slots[oldest], stamps[oldest])

    def _reap_reserved(self, slots: Numbers) -> bool:
        """Reap if other stores, maybe dead ones, have reserved any of the slots; tell whether."""
        owners = self._table.records[slots, Field.OWNER]
        is_reserved = bool(((owners != 0) & (owners != self._owner)).any())
        if is_reserved:
            self._table.reap()
        return is_reserved

    def _add_chunk(self, need: Need, *, older_than: int) -> bool:
        """Give the class a chunk more: one without a class, else another class's that is old enough."""
        table = self._table
        chunk = table.free_chunk(need.slot_bytes)
        if chunk is None:
            chunk = self._oldest_chunk(need, older_than)
        # Space comes first: where there is none for the records, nothing is evicted for them.
        if chunk is None or not table.allocate_records(chunk, need.slot_bytes):
            return False
        if table.chunks[chunk]:
            table.empty_chunk(chunk)
        table.assign(chunk, need.slot_bytes)
        return True

    def _oldest_chunk(self, need: Need, older_than: int) -> int | None:
        """Return the unused chunk of another class whose median stamp is the oldest, if old enough."""
        table = self._table
        best, best_median = None, older_than
        if older_than:
            self._reap_reserved(table.all_slots())
        for chunks, slots in self._others(need) if older_than else ():
            stamps = table.stamps[slots]
            middle = slots.shape[1] // 2
            medians = np.partition(stamps, middle, axis=1)[:, middle]
            is_used = (stamps >= need.before).any(axis=1) | table.records[slots, Field.OWNER].any(axis=1)
            medians[is_used] = RESERVED_STAMP
            if medians.min() < best_median:
                best, best_median = int(chunks[medians.argmin()]), int(medians.min())
        return best

    def _others(self, need: Need) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield chunks of other classes that could be given up, and their slots, one row a chunk."""
        geometry = self._table.geometry
        kept = set((need.keep // geometry.slots_per_chunk).tolist())
        for other in self._table.classes():
            if other == need.slot_bytes:
                continue
            by_count = defaultdict(list)  # the last chunk may be shorter
            for chunk in self._table.chunks_of(other).tolist():
                if chunk not in kept and geometry.num_slots_of(chunk, need.slot_bytes):
                    by_count[geometry.num_slots_of(chunk, other)].append(chunk)
            for count, alike in by_count.items():
                chunks = np.array(alike)
                yield chunks, chunks[:, None] * geometry.slots_per_chunk + np.arange(count)
