"""Making room: free slots first, then chunks without a class, then the least recently used objects.

Within a size class eviction follows the stamps exactly. Between classes whole chunks move: a chunk whose typical
object is older than the oldest one of the class that needs room is emptied and changes its class, so that classes
which nobody uses any more give their space up.
"""

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


class Room:
    """Finds the slots that a put may use. The caller holds the directory's lock.

    Args:
        table: of the store.
        owner: the store's id.
    """

    def __init__(self, table: SlotTable, owner: int) -> None:
        self._table, self._owner = table, owner
        self._scans: dict[int, _Scan] = {}

    def reserve(self, slot_bytes: int, want: int, *, before: int, keep: Numbers, taken: list[int]) -> None:
        """Reserve up to ``want`` slots of a class, evicting what was last used before a moment.

        Args:
            slot_bytes: the class.
            want: >= 1.
            before: objects stamped at this moment or later stay: someone may be copying them.
            keep: slots that stay too.
            taken: receives each slot before it is touched, so that the caller can give all back.
        """
        stop = len(taken) + want
        is_fresh = False
        while len(taken) < stop:
            scan = self._scans.get(slot_bytes)
            if scan is None or scan.changes != self._changes():
                scan, is_fresh = self._scan(slot_bytes, want), True
            chosen = np.flatnonzero(self._is_eligible(scan, before, keep))[: stop - len(taken)]
            num_free = int((scan.stamps[chosen] == 0).sum())
            if num_free < stop - len(taken) and self._add_chunk(
                slot_bytes, scan, chosen, is_fresh, before, keep
            ):
                continue
            if chosen.size:
                slots = scan.slots[chosen]
                scan.slots, scan.stamps = scan.slots[chosen[-1] + 1 :], scan.stamps[chosen[-1] + 1 :]
                taken.extend(slots.tolist())
                self._table.take(slots)
            elif is_fresh:
                return
            else:
                del self._scans[slot_bytes]

    def _changes(self) -> int:
        return int(self._table.header[HeaderWord.CHANGES])

    def _is_eligible(self, scan: _Scan, before: int, keep: Numbers) -> Bools:
        table = self._table
        eligible: Bools = (table.stamps[scan.slots] == scan.stamps) & (scan.stamps < before)
        eligible &= table.records[scan.slots, Field.OWNER] == 0
        if keep.size:
            eligible &= ~np.isin(scan.slots, keep)
        return eligible

    def _scan(self, slot_bytes: int, want: int) -> _Scan:
        table = self._table
        slots = table.class_slots(slot_bytes)
        stamps = table.stamps[slots]
        if self._has_strangers(slots[stamps == RESERVED_STAMP]):
            table.reap()
            stamps = table.stamps[slots]
        count = min(len(slots), max(MIN_CANDIDATES, want, len(slots) // CANDIDATE_SHARE))
        oldest = np.argpartition(stamps, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
        oldest = oldest[np.argsort(stamps[oldest], kind="stable")]
        oldest = oldest[stamps[oldest] < RESERVED_STAMP]
        scan = _Scan(self._changes(), slots[oldest], stamps[oldest])
        self._scans[slot_bytes] = scan
        return scan

    def _has_strangers(self, reserved: Numbers) -> bool:
        return bool((self._table.records[reserved, Field.OWNER] != self._owner).any())

    def _add_chunk(
        self, slot_bytes: int, scan: _Scan, chosen: Numbers, is_fresh: bool, before: int, keep: Numbers
    ) -> bool:
        """Give the class another chunk, where there is one or an older class has one to give."""
        if self._table.add_chunk(slot_bytes):
            return True
        if not is_fresh:
            return False
        evictable = scan.stamps[chosen][scan.stamps[chosen] > 0]
        older_than = int(evictable[0]) if evictable.size else before
        chunk = self._oldest_chunk(slot_bytes, older_than, before, keep)
        if chunk is None:
            return False
        self._table.empty_chunk(chunk)
        return self._table.add_chunk(slot_bytes)

    def _oldest_chunk(self, slot_bytes: int, older_than: int, before: int, keep: Numbers) -> int | None:
        """Return the chunk of another class whose median stamp is the oldest, if old enough and unused."""
        geometry, table = self._table.geometry, self._table
        oldest, oldest_median = None, older_than
        for other in table.classes():
            if other == slot_bytes:
                continue
            count = geometry.chunk_bytes // other
            chunks = table.chunks_of(other)
            chunks = chunks[[geometry.num_slots_of(chunk, other) == count for chunk in chunks.tolist()]]
            chunks = chunks[~np.isin(chunks, keep // geometry.slots_per_chunk)]
            slots = chunks[:, None] * geometry.slots_per_chunk + np.arange(count)
            stamps = table.stamps[slots]
            medians = np.partition(stamps, count // 2, axis=1)[:, count // 2]
            for at in np.argsort(medians).tolist():
                if medians[at] >= oldest_median:
                    break
                is_used = (stamps[at] >= before).any() or table.records[slots[at], Field.OWNER].any()
                if not is_used:
                    oldest, oldest_median = int(chunks[at]), int(medians[at])
                    break
        return oldest
