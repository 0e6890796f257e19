"""What a put does: reserve slots, copy without the lock, publish; step by step."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.stores.base import PutHint, PutResult
from hybridkv.stores.local.directory import AtPoint, StoreDirectory
from hybridkv.stores.local.geometry import KEY_WORD, Field
from hybridkv.stores.local.index import Numbers, Words
from hybridkv.stores.local.key_batch import KeyBatch, checksum
from hybridkv.stores.local.room import Need, Room
from hybridkv.stores.local.slots import SlotTable, slot_bytes_for
from hybridkv.stores.regions import Pieces

STEP_KEYS = 256
STEP_BYTES = 64 * 2**20
"""A step reserves at most this much (one object at least): a whole prompt that is put into a full store
holds the lock briefly each time, and what it will evict stays readable until its turn comes."""

_STORED, _ALREADY, _REFUSED = PutResult.STORED, PutResult.ALREADY, PutResult.REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBatch:
    """The arguments of one put, checked and resolved, and what is known of them.

    Attributes:
        keys: at least one.
        rows: the keys as words.
        pieces: one for each key.
        hints: one for each key, or ``None``.
        begun: the stamp of the moment when the put began.
        results: one for each key, filled in step by step.
    """

    keys: Sequence[str]
    rows: KeyBatch
    pieces: Sequence[Pieces]
    hints: Sequence[PutHint] | None
    begun: int
    results: list[PutResult]


class Putting:
    """Carries puts out for one store; several threads may put at once.

    Args:
        directory: of the store.
        table: of the store.
        at_point: called between the steps of the protocol.

    Attributes:
        stored_objects: by this store.
        stored_bytes: by this store.
    """

    def __init__(self, directory: StoreDirectory, table: SlotTable, at_point: AtPoint) -> None:
        self._directory, self._table, self._at_point = directory, table, at_point
        self._room = Room(table, directory.owner)
        self._arena = directory.arena.data
        self.stored_objects = self.stored_bytes = 0

    def put(
        self, keys: Sequence[str], pieces: Sequence[Pieces], hints: Sequence[PutHint] | None
    ) -> list[PutResult]:
        """Copy objects in; none of the batch's own is evicted by it."""
        begun, rows = self._table.now(), KeyBatch.of(keys)
        held = self._table.find(rows).slots
        batch = PutBatch(
            keys=keys,
            rows=rows,
            pieces=pieces,
            hints=hints,
            begun=begun,
            results=[_REFUSED if slot < 0 else _ALREADY for slot in held.tolist()],
        )
        keep = held[held >= 0]
        new, twins = self._tell_apart(batch)
        for step in self._steps(new, pieces):
            keep = np.concatenate((keep, self._put_step(batch, step, keep)))
        for twin, first in twins:
            is_taken = batch.results[first] in {_STORED, _ALREADY}
            batch.results[twin] = _ALREADY if is_taken else batch.results[first]
        return batch.results

    def _tell_apart(self, batch: PutBatch) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the positions of what is to be stored, and of later twins with their first."""
        largest = self._table.geometry.chunk_bytes
        first: dict[str, int] = {}
        twins = []
        for idx, (key, result) in enumerate(zip(batch.keys, batch.results, strict=True)):
            if result is _ALREADY or batch.pieces[idx].num_bytes > largest:
                continue
            if first.setdefault(key, idx) != idx:
                twins.append((idx, first[key]))
        return list(first.values()), twins

    @staticmethod
    def _steps(new: Sequence[int], pieces: Sequence[Pieces]) -> Iterator[list[int]]:
        step: list[int] = []
        num_bytes = 0
        for idx in new:
            size = pieces[idx].num_bytes
            if step and (len(step) == STEP_KEYS or num_bytes + size > STEP_BYTES):
                yield step
                step, num_bytes = [], 0
            step.append(idx)
            num_bytes += size
        if step:
            yield step

    def _put_step(self, batch: PutBatch, step: Sequence[int], keep: Numbers) -> Numbers:
        """Put some objects and return the slots that hold them."""
        taken: list[int] = []
        try:
            with self._directory.locked():
                served = self._reserve(batch, step, keep, taken)
            slots = np.array(taken, dtype=np.int64)
            heads = self._copy(batch, served, slots)
            with self._directory.locked():
                return self._publish(batch, served, slots, heads)
        except BaseException:
            with self._directory.locked():
                self._table.release(np.array(taken, dtype=np.int64))
            raise

    def _reserve(self, batch: PutBatch, step: Sequence[int], keep: Numbers, taken: list[int]) -> list[int]:
        """Reserve slots, noted in ``taken``, and return the positions that got one, in the same order."""
        by_class = defaultdict(list)
        for idx in step:
            by_class[slot_bytes_for(batch.pieces[idx].num_bytes)].append(idx)
        served: list[int] = []
        for slot_bytes, members in by_class.items():
            need = Need(slot_bytes=slot_bytes, count=len(members), before=batch.begun, keep=keep)
            self._room.reserve(need, taken)
            served += members[: len(taken) - len(served)]
        return served

    def _copy(self, batch: PutBatch, served: Sequence[int], slots: Numbers) -> Words:
        """Copy payloads into reserved slots and return the heads of their records."""
        places, _ = self._table.places(slots)
        heads = np.zeros((len(served), KEY_WORD), dtype=np.uint64)
        arena, hashes, all_pieces = self._arena, batch.rows.hashes.tolist(), batch.pieces
        checksums, sizes = [], []
        for idx, place in zip(served, places.tolist(), strict=True):
            pieces = all_pieces[idx]
            payload = arena[place : place + pieces.num_bytes]
            pieces.gather_into(payload)
            checksums.append(checksum(payload, hashes[idx]))
            sizes.append(pieces.num_bytes)
            self._at_point("put: one payload copied")
        heads[:, Field.CHECKSUM] = np.array(checksums, dtype=np.uint64)
        heads[:, Field.NUM_BYTES] = sizes
        heads[:, Field.STORED_AT] = time.time_ns()
        return heads

    def _publish(self, batch: PutBatch, served: list[int], slots: Numbers, heads: Words) -> Numbers:
        if not served:
            return slots
        hints = None if batch.hints is None else [batch.hints[idx] for idx in served]
        rows = batch.rows.take(np.array(served))
        stored, taken = self._table.publish(slots, rows, heads, self._table.now(), hints)
        for idx, is_stored, is_taken in zip(served, stored.tolist(), taken.tolist(), strict=True):
            batch.results[idx] = _STORED if is_stored else _ALREADY if is_taken else _REFUSED
        self.stored_objects += int(stored.sum())
        self.stored_bytes += int(heads[stored, Field.NUM_BYTES].sum())
        return slots[stored]
