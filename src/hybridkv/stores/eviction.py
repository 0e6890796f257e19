"""Which objects a full store gives up first."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.stores.base import PutHint


class EvictionPolicy(Protocol):
    """Keeps the order in which one store's objects may go.

    The store calls it under its lock and batch by batch, tells it of every object that comes, serves or goes,
    and owns sizes and capacity; the policy only orders. One policy object belongs to one store.
    """

    def stored(self, keys: Sequence[str], hints: Sequence[PutHint] | None) -> None:
        """Take in new objects, in the order of the batch.

        Args:
            keys: distinct, and unknown to the policy.
            hints: one for each key, or ``None`` when the planner gave none.
        """

    def used(self, keys: Sequence[str]) -> None:
        """Note that objects were served, in the order of the batch; a key may occur twice."""

    def discarded(self, keys: Sequence[str]) -> None:
        """Forget objects, whether they were evicted or discarded; the keys are distinct and known."""

    def victims(self) -> Iterator[str]:
        """Return the known keys, the first to go first; a policy may leave out what it protects.

        The store takes as many as it needs and reports them by ``discarded`` afterwards; in between it calls
        no method of the policy.
        """


class LruEviction:
    """Evicts the least recently used object first; every step is O(1) for each key."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def stored(self, keys: Sequence[str], hints: Sequence[PutHint] | None) -> None:  # noqa: ARG002
        """Make the keys the most recently used; hints are ignored."""
        order = self._order
        for key in keys:
            order[key] = None

    def used(self, keys: Sequence[str]) -> None:
        """Make the keys the most recently used."""
        move_to_end = self._order.move_to_end
        for key in keys:
            move_to_end(key)

    def discarded(self, keys: Sequence[str]) -> None:
        """Forget the keys."""
        order = self._order
        for key in keys:
            del order[key]

    def victims(self) -> Iterator[str]:
        """Return the keys, the least recently used first."""
        return iter(self._order)


class StampPolicy(Protocol):
    """Orders the objects of a store that processes share: by one number an object, in shared memory.

    An ``EvictionPolicy`` keeps an order of its own, which processes cannot share without a lock at every
    use. Here the policy only says which number an object gets; the smallest goes first. The store looks at
    all numbers now and then and remembers the smallest: an object whose number is below those of older ones
    is considered from the next look on.
    """

    def stored(self, now: int, count: int, hints: Sequence[PutHint] | None) -> NDArray[np.uint64]:
        """Return the stamps of new objects, in the order of the batch.

        Args:
            now: this moment, in ns; grows from call to call.
            count: objects.
            hints: one for each object, or ``None`` when the planner gave none.
        """

    def used(self, now: int, count: int) -> NDArray[np.uint64]:
        """Return the stamps of objects that are served, in the order of the batch."""


class LruStamps:
    """The least recently used object goes first."""

    def stored(self, now: int, count: int, hints: Sequence[PutHint] | None) -> NDArray[np.uint64]:  # noqa: ARG002
        """Return the moment of each; hints are ignored."""
        return self.used(now, count)

    def used(self, now: int, count: int) -> NDArray[np.uint64]:
        """Return the moment of each, 1 ns apart, so that the batch keeps its order."""
        return np.arange(now, now + count, dtype=np.uint64)
