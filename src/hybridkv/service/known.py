"""Objects seen stored lately, so that a repair asks the store only about the others."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.clock import Clock


class KnownObjects:
    """At most ``capacity`` objects, the latest known ones, each for ``age_s`` / 2 to ``age_s``.

    They are kept in two generations, of which the older one is dropped as a whole: a bound on number and age
    without a step per object. Objects go by a 64-bit hash of their digest: where two share it, one of them
    may not be repaired.

    Args:
        digest_bytes: length of one digest; digests are handed over laid end to end.
        num_groups: spec groups.
        capacity: objects, >= 0.
        age_s: for how long an object counts as stored at most, seconds; 0 = not at all.
        clock: tells the time.
    """

    def __init__(
        self, digest_bytes: int, *, num_groups: int, capacity: int, age_s: float, clock: Clock
    ) -> None:
        self._digest_bytes, self._num_groups = digest_bytes, num_groups
        self._capacity, self._age_s, self._clock = capacity, age_s, clock
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, (*self._young, *self._old)))

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = self._empty(), self._empty()
        self._period = self._now()

    def note(self, spec_group: int, digests: bytes) -> None:
        """Take objects for stored."""
        if self._age_s <= 0:
            return
        self._turn_to(self._now())
        room = self._capacity // 2
        names = self._names(digests)[max(0, len(digests) // self._digest_bytes - room) :]
        if sum(map(len, self._young)) + len(names) > room:
            self._young, self._old = self._empty(), self._young
        self._young[spec_group].update(names)

    def forget(self, spec_group: int, digests: bytes) -> None:
        """Take objects for stored no more."""
        for generation in (self._young, self._old):
            generation[spec_group].difference_update(self._names(digests))

    def unknown(self, spec_group: int, digests: bytes) -> NDArray[np.bool_]:
        """Return for each object whether the store has to be asked, shape (objects,)."""
        self._turn_to(self._now())
        young, old = self._young[spec_group], self._old[spec_group]
        return np.array([name not in young and name not in old for name in self._names(digests)], np.bool_)

    def _turn_to(self, period: int) -> None:
        if period != self._period:
            is_next = period == self._period + 1
            self._young, self._old = self._empty(), self._young if is_next else self._empty()
            self._period = period

    def _now(self) -> int:
        """Return the number of the present half of ``age_s``."""
        return int(self._clock.now_s() / (self._age_s / 2)) if self._age_s > 0 else 0

    def _empty(self) -> list[set[int]]:
        return [set() for _ in range(self._num_groups)]

    def _names(self, digests: bytes) -> list[int]:
        width = self._digest_bytes
        return [hash(digests[start : start + width]) for start in range(0, len(digests), width)]
