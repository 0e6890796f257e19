"""The index: from a key's hash to the slots that may hold it."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.stores.local.geometry import BUCKET_WORDS

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Bools = NDArray[np.bool_]

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_SHIFTS = np.array([0, 21], dtype=np.uint64)
_WITHIN = np.arange(BUCKET_WORDS)


class BucketIndex:
    """Hash buckets in shared memory, a hint only: whoever finds a slot asks its record.

    An entry is a word, ``upper half of the hash << 32 | slot + 1``, 0 where there is none. A hash has two
    buckets of eight entries. At a load of a half that leaves room in one of them, so nothing ever moves: an
    entry appears or vanishes by one aligned store, and readers need no lock.

    Args:
        words: ``8 * num_buckets`` words, num_buckets a power of two.
    """

    def __init__(self, words: Words) -> None:
        self._flat = words
        self._buckets = words.reshape(-1, BUCKET_WORDS)
        self._mask = np.uint64(len(self._buckets) - 1)

    def candidates(self, hashes: Words) -> tuple[Numbers, Numbers]:
        """Return what may hold each hash: positions in the batch and their slots; needs no lock.

        A hash may have several candidates or none, and a damaged entry may name any slot, or -1.
        """
        entries = self._buckets.take(self._bucket_pairs(hashes), axis=0).reshape(-1, 2 * BUCKET_WORDS)
        hits = (entries >> _HALF) == (hashes >> _HALF)[:, None]
        positions, places = hits.nonzero()
        return positions, _slots(entries[positions, places])

    def insert(self, hashes: Words, slots: Numbers) -> Bools:
        """Add entries and tell which found room; the caller holds the lock."""
        entries, pairs = _entries(hashes, slots), self._bucket_pairs(hashes)
        done = np.zeros(len(hashes), dtype=np.bool_)
        todo = np.arange(len(hashes))
        while todo.size:
            free = self._buckets.take(pairs[todo], axis=0) == 0
            each, emptier = np.arange(len(todo)), free.sum(axis=2).argmax(axis=1)
            free = free[each, emptier]
            has_room = free.any(axis=1)
            places = (pairs[todo, emptier] * BUCKET_WORDS + free.argmax(axis=1))[has_room]
            todo = todo[has_room]
            self._flat[places] = entries[todo]
            # Where several chose one place the last stays; the others go again.
            stays = self._flat[places] == entries[todo]
            done[todo[stays]] = True
            todo = todo[~stays]
        return done

    def delete(self, hashes: Words, slots: Numbers) -> None:
        """Remove entries, where they are; the caller holds the lock."""
        places = self._places(self._bucket_pairs(hashes))
        self._flat[places[self._flat[places] == _entries(hashes, slots)[:, None]]] = 0

    def strays(self, hashes: Words, slots: Numbers) -> Numbers:
        """Return the places of all entries but those of some slots where their hashes have them."""
        places = self._places(self._bucket_pairs(hashes))
        is_stray = self._flat != 0
        is_stray[places[self._flat[places] == _entries(hashes, slots)[:, None]]] = False
        return np.flatnonzero(is_stray)

    def erase(self, places: Numbers) -> None:
        """Remove the entries at some places; the caller holds the lock."""
        self._flat[places] = 0

    def _bucket_pairs(self, hashes: Words) -> Numbers:
        """Return the two buckets of each hash, (n, 2)."""
        return ((hashes[:, None] >> _SHIFTS) & self._mask).view(np.int64)

    def _places(self, pairs: Numbers) -> Numbers:
        """Return the places of all entries of bucket pairs, (n, 16)."""
        return ((pairs * BUCKET_WORDS)[:, :, None] + _WITHIN).reshape(-1, 2 * BUCKET_WORDS)


def _entries(hashes: Words, slots: Numbers) -> Words:
    return (hashes & ~_LOW) | (slots + 1).astype(np.uint64)


def _slots(entries: Words) -> Numbers:
    return (entries & _LOW).astype(np.int64) - 1
