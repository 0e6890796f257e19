"""Verifies a local store: payloads against their checksums, records against the index."""

import numpy as np

from hybridkv.stores.base import CheckReport
from hybridkv.stores.local.directory import StoreDirectory
from hybridkv.stores.local.geometry import KEY_WORD, Field
from hybridkv.stores.local.index import Bools, Numbers
from hybridkv.stores.local.key_batch import checksum, key_of
from hybridkv.stores.local.slots import SlotTable


def check_store(directory: StoreDirectory, table: SlotTable, *, fix: bool) -> CheckReport:
    """Check a store that others may go on using; payloads are read without the lock.

    Args:
        directory: open.
        table: of the directory.
        fix: discard what is damaged and repair the index, in which what is right stays all the time.
    """
    with directory.locked():
        table.reap()
        slots = table.published()
        records = table.records.take(slots, axis=0)
        is_lost = table.find(table.keys_of(slots)).slots != slots if slots.size else slots > 0
        stale = len(_strays(table, slots))
        reserved = int((table.records[table.all_slots(), Field.OWNER] > 0).sum())
    is_bad = ~_verified(directory, table, slots)
    with directory.locked():
        is_same = table.is_same(slots, records[:, :KEY_WORD])
        corrupt = slots[is_bad & is_same]
        if fix:
            table.discard(corrupt)
            published = table.published()
            table.index.erase(_strays(table, published))
            table.reindex(published)
    return CheckReport(
        objects=len(slots),
        used_bytes=int(records[:, Field.NUM_BYTES].sum()),
        reserved_objects=reserved,
        corrupt_objects=len(corrupt),
        lost_objects=int((is_lost & is_same & ~is_bad).sum()),
        stale_entries=stale,
        is_fixed=fix,
    )


def _strays(table: SlotTable, published: Numbers) -> Numbers:
    """Return where the index names no published slot of the hash there: misses, not errors."""
    return table.index.strays(table.records[published, Field.HASH], published)


def _verified(directory: StoreDirectory, table: SlotTable, slots: Numbers) -> Bools:
    """Tell for each slot whether its record and its payload belong together."""
    arena = directory.arena.data
    places, slot_bytes = table.places(slots)
    good = np.zeros(len(slots), dtype=np.bool_)
    for idx, (slot, place, room) in enumerate(
        zip(slots.tolist(), places.tolist(), slot_bytes.tolist(), strict=True)
    ):
        record = table.records[slot].copy()
        key_hash, num_bytes = int(record[Field.HASH]), int(record[Field.NUM_BYTES])
        good[idx] = (
            0 < num_bytes <= room
            and key_of(record) is not None
            and checksum(arena[place : place + num_bytes], key_hash) == int(record[Field.CHECKSUM])
        )
    return good
