"""The index: from a key's hash to the slots that may hold it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hybridkv.stores.local.geometry import BUCKET_WORDS

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Bools = NDArray[np.bool_]

Matches = Callable[[Numbers, Numbers], Bools]
"""Tells which slots hold what is sought: (positions in the batch, their slots) to one bool each."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_SECOND = np.uint64(21)


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

    def find(self, hashes: Words, matches: Matches) -> Numbers:
        """Return the slot of each hash that ``matches``, or -1; needs no lock."""
        entries = self._buckets[self._bucket_pairs(hashes)].reshape(len(hashes), -1)
        hits = ((entries >> _HALF) == (hashes >> _HALF)[:, None]) & ((entries & _LOW) != 0)
        slots = np.full(len(hashes), -1, dtype=np.int64)
        todo = np.flatnonzero(hits.any(axis=1))
        while todo.size:
            places = hits[todo].argmax(axis=1)
            found = _slots(entries[todo, places])
            good = matches(todo, found)
            slots[todo[good]] = found[good]
            hits[todo, places] = False
            todo = todo[~good]
            todo = todo[hits[todo].any(axis=1)]
        return slots

    def insert(self, hashes: Words, slots: Numbers) -> Bools:
        """Add entries and tell which found room; the caller holds the lock."""
        entries = _entries(hashes, slots)
        pairs = self._bucket_pairs(hashes)
        done = np.zeros(len(hashes), dtype=np.bool_)
        todo = np.arange(len(hashes))
        while todo.size:
            free = self._buckets[pairs[todo]] == 0
            fuller = free.sum(axis=2).argmin(axis=1)
            # Where both have room, the emptier bucket; where one is full, the other.
            free[np.arange(len(todo)), fuller] &= ~free[np.arange(len(todo)), 1 - fuller].any(axis=1)[:, None]
            free = free.reshape(len(todo), -1)
            has_room = free.any(axis=1)
            todo, free = todo[has_room], free[has_room]
            places = self._places(pairs[todo])[np.arange(len(todo)), free.argmax(axis=1)]
            places, winners = np.unique(places, return_index=True)  # the others go again
            self._flat[places] = entries[todo[winners]]
            done[todo[winners]] = True
            todo = np.delete(todo, winners)
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
        pairs = np.stack((hashes & self._mask, (hashes >> _SECOND) & self._mask), axis=1)
        return pairs.astype(np.int64)

    def _places(self, pairs: Numbers) -> Numbers:
        """Return the places of all entries of bucket pairs, (n, 16)."""
        places: Numbers = pairs[:, :, None] * BUCKET_WORDS + np.arange(BUCKET_WORDS)
        return places.reshape(len(pairs), 2 * BUCKET_WORDS)


def _entries(hashes: Words, slots: Numbers) -> Words:
    return (hashes & ~_LOW) | (slots + 1).astype(np.uint64)


def _slots(entries: Words) -> Numbers:
    return (entries & _LOW).astype(np.int64) - 1
