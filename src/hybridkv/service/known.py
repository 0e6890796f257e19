"""Objects seen stored lately, so that a repair asks the store only about the others."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from hybridkv.clock import Clock


class KnownObjects:
    """At most ``capacity`` objects, each for ``age_s``; the longest known is forgotten first.

    Objects go by a 64-bit hash of their digest: where two share it, one of them may not be repaired.

    Args:
        digest_bytes: length of one digest; digests are handed over laid end to end.
        capacity: objects, >= 0.
        age_s: for how long an object counts as stored, seconds.
        clock: tells the time.
    """

    def __init__(self, digest_bytes: int, *, capacity: int, age_s: float, clock: Clock) -> None:
        self._digest_bytes, self._capacity, self._age_s, self._clock = digest_bytes, capacity, age_s, clock
        self._until_s: dict[tuple[int, int], float] = {}

    def note(self, spec_group: int, digests: bytes) -> None:
        """Take objects for stored."""
        until_s = self._clock.now_s() + self._age_s
        for name in self._names(digests):
            self._until_s.pop((spec_group, name), None)
            self._until_s[spec_group, name] = until_s
        while len(self._until_s) > self._capacity:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, spec_group: int, digests: bytes) -> None:
        """Take objects for stored no more."""
        for name in self._names(digests):
            self._until_s.pop((spec_group, name), None)

    def clear(self) -> None:
        """Forget all."""
        self._until_s.clear()

    def unknown(self, spec_group: int, digests: bytes) -> NDArray[np.bool_]:
        """Return for each object whether the store has to be asked, shape (objects,)."""
        now_s = self._clock.now_s()
        is_unknown = [self._until_s.get((spec_group, name), -inf) <= now_s for name in self._names(digests)]
        return np.array(is_unknown, dtype=np.bool_)

    def _names(self, digests: bytes) -> list[int]:
        width = self._digest_bytes
        return [hash(digests[start : start + width]) for start in range(0, len(digests), width)]
