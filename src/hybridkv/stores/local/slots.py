"""The slots of a local store: who may read, write and reuse them.

A slot holds one object. Its record is the truth; the index is a hint.

::

    FREE       generation odd,  owner 0,  stamp 0 (a late reader may leave another: it is only found later)
    RESERVED   generation odd,  owner id, stamp RESERVED_STAMP
    PUBLISHED  generation even, owner 0,  stamp = last use

    FREE --reserve--> RESERVED --publish--> PUBLISHED --reserve (evicts)--> RESERVED
    RESERVED --release, reap--> FREE        PUBLISHED --discard, steal a chunk--> FREE

A generation takes two steps a life and never goes back, so a reader that finds the same even generation
before and after its copy has copied one object. Words are stored one by one and in program order (x86;
elsewhere the calls of the lock order them), so a process that is killed between two lines leaves one of the
states above, except

* an odd slot that the index still names: a miss, and its next user deletes the entry;
* a published slot with an owner: killed before publish was done, which ``reap`` completes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.errors import StoreError
from hybridkv.stores.base import PutHint
from hybridkv.stores.eviction import StampPolicy
from hybridkv.stores.local.directory import AtPoint, StoreDirectory
from hybridkv.stores.local.geometry import (
    ARENA_SHIFT,
    BUCKET_WORDS,
    GRANULE,
    KEY_WORD,
    RECORD_WORDS,
    Field,
    HeaderWord,
)
from hybridkv.stores.local.index import Bools, BucketIndex, Numbers, Words
from hybridkv.stores.local.key_batch import KeyBatch

RESERVED_STAMP = 1 << 62
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a batch's keys were found to be.

    Attributes:
        slots: (n,), -1 where the key is not published.
        heads: (n, KEY_WORD), the records before their keys; 0 where not published.
    """

    slots: Numbers
    heads: Words


class SlotTable:
    """The records, stamps and size classes in the meta file.

    What stands under "without the lock" needs none; the caller of everything else holds the
    directory's.

    Args:
        directory: open.
        policy: gives the stamps; the published slot with the smallest goes first.
        at_point: called between the steps of each protocol.

    Attributes:
        evicted_objects: by this table.
        evicted_bytes: by this table.
    """

    def __init__(self, directory: StoreDirectory, policy: StampPolicy, at_point: AtPoint) -> None:
        geometry = directory.geometry
        words = directory.meta
        self._directory, self._policy, self._at_point = directory, policy, at_point
        self.geometry = geometry
        self.header = words[: geometry.chunks_offset // 8]
        self.chunks = words[geometry.chunks_offset // 8 :][: geometry.num_chunks]
        self.index = BucketIndex(words[geometry.index_offset // 8 :][: geometry.num_buckets * BUCKET_WORDS])
        self.stamps = words[geometry.stamps_offset // 8 :][: geometry.num_slots]
        self.records = words[geometry.records_offset // 8 :].reshape(geometry.num_slots, RECORD_WORDS)
        self._generations, self._owners = self.records[:, Field.GENERATION], self.records[:, Field.OWNER]
        self._bodies = self.records[:, Field.GENERATION + 1 :]
        self.evicted_objects = self.evicted_bytes = 0
        if (self.chunks % GRANULE).any() or (self.chunks > geometry.chunk_bytes).any():
            raise StoreError(f"local store {directory.path}: the meta file is damaged; remove the directory")

    # --- without the lock ----------------------------------------------------------------------------------

    def find(self, keys: KeyBatch) -> Found:
        """Return which keys are published, and where."""
        found = Found(
            slots=np.full(len(keys.hashes), -1, dtype=np.int64),
            heads=np.zeros((len(keys.hashes), KEY_WORD), dtype=np.uint64),
        )
        positions, slots = self.index.candidates(keys.hashes)
        if not positions.size:
            return found
        # A damaged entry may name any slot, or -1, which is a large number without its sign.
        safe = np.minimum(slots.view(np.uint64), np.uint64(len(self.records) - 1)).view(np.int64)
        # The generation comes first: if it is the same at the end, everything between belongs together.
        generations = self._generations[safe]
        rows = self.records.take(safe, axis=0)
        good = (rows[:, Field.HASH] == keys.hashes[positions]) & (safe == slots)
        good &= _is_published(generations) & (rows[:, Field.KEY_CHARS] == keys.chars[positions])
        key_stop = KEY_WORD + keys.words.shape[1]
        good &= (rows[:, KEY_WORD:key_stop] == keys.words[positions]).all(axis=1)
        rows[:, Field.GENERATION] = generations
        found.slots[positions[good]] = slots[good]
        found.heads[positions[good]] = rows[good, :KEY_WORD]
        return found

    def served(self, slots: Numbers, now: int) -> None:
        """Stamp slots that are about to be copied from: they become the last to go."""
        self.stamps[slots] = self._policy.used(now, len(slots))

    def now(self) -> int:
        """Return the stamp of this moment."""
        return time.monotonic_ns() + int(self.header[HeaderWord.STAMP_BASE])

    def is_same(self, slots: Numbers, heads: Words) -> Bools:
        """Tell which slots have held one object ever since their heads were read."""
        same: Bools = self._generations[slots] == heads[:, Field.GENERATION]
        return same

    def places(self, slots: Numbers) -> tuple[Numbers, Numbers]:
        """Return where each slot begins in the arena file, and its size."""
        chunks, within = np.divmod(slots, self.geometry.slots_per_chunk)
        slot_bytes = self.chunks[chunks].astype(np.int64)
        return ARENA_SHIFT + chunks * self.geometry.chunk_bytes + within * slot_bytes, slot_bytes

    def published(self) -> Numbers:
        """Return the slots that are published at this moment."""
        slots = self.all_slots()
        return slots[_is_published(self._generations[slots])]

    def all_slots(self) -> Numbers:
        """Return the slots of all chunks that have a size class."""
        parts = [self.class_slots(slot_bytes) for slot_bytes in self.classes()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def classes(self) -> list[int]:
        """Return the slot sizes that chunks have."""
        sizes: list[int] = np.unique(self.chunks[self.chunks > 0]).tolist()
        return sizes

    def chunks_of(self, slot_bytes: int) -> Numbers:
        """Return the chunks of one class."""
        return np.flatnonzero(self.chunks == slot_bytes)

    def class_slots(self, slot_bytes: int) -> Numbers:
        """Return the slots of one class."""
        return self._slots_of(self.chunks_of(slot_bytes), slot_bytes)

    def _slots_of(self, chunks: Numbers, slot_bytes: int) -> Numbers:
        """Return the slots of chunks of one class."""
        count = self.geometry.chunk_bytes // slot_bytes
        slots = (chunks[:, None] * self.geometry.slots_per_chunk + np.arange(count)).ravel()
        last = self.geometry.num_chunks - 1  # it may be shorter
        stop = last * self.geometry.slots_per_chunk + self.geometry.num_slots_of(last, slot_bytes)
        return slots[slots < stop]

    # --- under the lock: publish and release ---------------------------------------------------------------

    def publish(
        self,
        slots: Numbers,
        keys: KeyBatch,
        heads: Words,
        now: int,
        hints: Sequence[PutHint] | None,
    ) -> tuple[Bools, Bools]:
        """Make reserved slots readable whose payload is complete.

        Args:
            slots: reserved by this store.
            keys: distinct, one for each slot.
            heads: (n, KEY_WORD), of which CHECKSUM, NUM_BYTES and STORED_AT are taken.
            now: the stamp of this moment.
            hints: one for each slot, or ``None``.

        Returns:
            Which keys are published now, and which another store had published before.
        """
        taken = self.find(keys).slots >= 0
        fresh = np.flatnonzero(~taken)
        mine, wanted = slots[fresh], keys.take(fresh)
        rows = np.zeros((len(fresh), RECORD_WORDS), dtype=np.uint64)
        rows[:, :KEY_WORD] = heads[fresh]
        rows[:, Field.HASH], rows[:, Field.KEY_CHARS] = wanted.hashes, wanted.chars
        rows[:, Field.OWNER] = self._directory.owner
        rows[:, KEY_WORD : KEY_WORD + wanted.words.shape[1]] = wanted.words
        self._bodies[mine] = rows[:, Field.GENERATION + 1 :]
        self.stamps[mine] = self._policy.stored(
            now, len(fresh), None if hints is None else [hints[idx] for idx in fresh.tolist()]
        )
        self._at_point("publish: record written")
        self._generations[mine] += _ONE
        self._at_point("publish: readable")
        stored = ~taken
        stored[fresh] = self.index.insert(wanted.hashes, mine)
        self._at_point("publish: indexed")
        self._generations[slots[~taken & ~stored]] += _ONE
        self._owners[slots[stored]] = 0
        self._at_point("publish: done")
        self.release(slots[~stored])
        return stored, taken

    def release(self, slots: Numbers) -> None:
        """Give reserved slots back; those that this store has not reserved are left alone."""
        if slots.size:
            self._settle(slots[self._owners[slots] == self._directory.owner])

    def discard(self, slots: Numbers) -> None:
        """Make published slots free."""
        self._unpublish(slots)
        self._free(slots)

    def _unpublish(self, slots: Numbers) -> None:
        """Make slots unreadable, first to those that copy from them, then to those that look for them."""
        published = slots[_is_published(self._generations[slots])]
        self._generations[published] += _ONE
        self._at_point("evict: unreadable")
        # Also of slots that are free: whoever freed them may have been killed before the entry was deleted.
        self.index.delete(self.records[slots, Field.HASH], slots)
        self._at_point("evict: unindexed")

    def _free(self, slots: Numbers) -> None:
        if slots.size:
            self.stamps[slots] = 0
            self._at_point("free: stamp cleared")
            self._owners[slots] = 0
            self.header[HeaderWord.CHANGES] += _ONE

    # --- under the lock: reserve ---------------------------------------------------------------------------

    def take(self, slots: Numbers) -> None:
        """Reserve free and published slots, evicting what they hold."""
        published = slots[_is_published(self._generations[slots])]
        self._count_evicted(published)
        self._unpublish(slots)
        self._owners[slots] = self._directory.owner
        self._at_point("reserve: owned")
        self.stamps[slots] = RESERVED_STAMP
        self._at_point("reserve: done")

    def _count_evicted(self, published: Numbers) -> None:
        self.evicted_objects += len(published)
        self.evicted_bytes += int(self.records[published, Field.NUM_BYTES].sum())

    def free_chunk(self, slot_bytes: int) -> int | None:
        """Return a chunk without a class that has room for slots of a size."""
        free = self.chunks_of(0).tolist()
        return next((chunk for chunk in free if self.geometry.num_slots_of(chunk, slot_bytes)), None)

    def allocate_records(self, chunk: int, slot_bytes: int) -> bool:
        """Give the records of a chunk's slots their space; ``False`` where the file system has none left."""
        geometry, allocate = self.geometry, self._directory.allocate_meta
        first, count = chunk * geometry.slots_per_chunk, geometry.num_slots_of(chunk, slot_bytes)
        record_bytes = 8 * RECORD_WORDS
        return allocate(geometry.stamps_offset + 8 * first, 8 * count) and allocate(
            geometry.records_offset + record_bytes * first, record_bytes * count
        )

    def assign(self, chunk: int, slot_bytes: int) -> None:
        """Give a chunk without a class to one; its records have their space."""
        first = chunk * self.geometry.slots_per_chunk
        stop = first + self.geometry.num_slots_of(chunk, slot_bytes)
        # A record that was never used becomes free; the others are odd already.
        self.records[first:stop, Field.GENERATION] |= _ONE
        self.stamps[first:stop] = 0
        self._at_point("chunk: records ready")
        self.chunks[chunk] = slot_bytes
        self.header[HeaderWord.CHANGES] += _ONE
        self._at_point("chunk: assigned")

    def empty_chunk(self, chunk: int) -> None:
        """Evict what a chunk holds and take it from its class; none of its slots is reserved."""
        slots = self._slots_of(np.array([chunk]), int(self.chunks[chunk]))
        published = slots[_is_published(self._generations[slots])]
        self._count_evicted(published)
        self.discard(slots)
        self._at_point("chunk: emptied")
        self.chunks[chunk] = 0
        self._at_point("chunk: without class")

    # --- under the lock: recover ---------------------------------------------------------------------------

    def fill_holes(self) -> None:
        """Give what is in use of the meta file its space, where the file is a copy with holes."""
        geometry, used = self.geometry, np.flatnonzero(self.chunks).tolist()
        num_slots = sum(geometry.num_slots_of(chunk, int(self.chunks[chunk])) for chunk in used)
        if self._directory.meta_space() >= geometry.stamps_offset + 8 * (1 + RECORD_WORDS) * num_slots:
            return
        if not self._directory.allocate_meta(0, geometry.stamps_offset) or not all(
            self.allocate_records(chunk, int(self.chunks[chunk])) for chunk in used
        ):
            raise StoreError(f"local store {self._directory.path}: no space left for the meta file's holes")

    def let_time_go_on(self) -> None:
        """Raise the base of the stamps where the monotonic clock began anew: after a restart."""
        youngest = int(self.stamps[self.published()].max(initial=0))
        behind = youngest - self.now()
        if behind >= 0:
            self.header[HeaderWord.STAMP_BASE] += np.uint64(behind + 1)

    def reap(self) -> None:
        """Complete or undo what dead stores left half done; nobody's payload is read."""
        slots = self.all_slots()
        owners = self._owners[slots]
        known = self._directory.owners() | set(np.unique(owners[owners > 0]).tolist())
        for owner in known - {self._directory.owner}:
            if self._directory.is_dead(owner):
                self._settle(slots[owners == owner])
                self._directory.forget_owner(owner)
                self._at_point("reap: owner forgotten")

    def _settle(self, owned: Numbers) -> None:
        """Complete the slots of one store that are readable already, and free the others."""
        published = _is_published(self._generations[owned])
        self.reindex(owned[published])
        self._at_point("settle: published completed")
        self._free(owned[~published])
        self._at_point("settle: reserved freed")

    def reindex(self, slots: Numbers) -> None:
        """Put published slots into the index again, ownerless; what another slot holds too is freed."""
        if not slots.size:
            return
        keys, records = self.keys_of(slots), self.records
        missing = slots[self.find(keys).slots < 0]
        self.index.insert(records[missing, Field.HASH], missing)
        unreachable = slots[self.find(keys).slots != slots]
        self._unpublish(unreachable)
        self._free(unreachable)
        records[slots, Field.OWNER] = 0

    def keys_of(self, slots: Numbers) -> KeyBatch:
        """Return the keys of published slots."""
        rows = self.records.take(slots, axis=0)
        chars = rows[:, Field.KEY_CHARS]
        words = -(-int(chars.max(initial=1)) // 8)
        return KeyBatch(hashes=rows[:, Field.HASH], chars=chars, words=rows[:, KEY_WORD : KEY_WORD + words])


def slot_bytes_for(num_bytes: int) -> int:
    """Return the size class of an object."""
    return -(-num_bytes // GRANULE) * GRANULE


def _is_published(generations: Words) -> Bools:
    published: Bools = (generations > 0) & (generations & _ONE == 0)
    return published
