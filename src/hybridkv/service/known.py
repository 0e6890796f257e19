"""What this process has seen stored, so that a repair asks the store only about the rest."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.clock import Clock


class KnownObjects:
    """A bounded set of objects that were stored a while ago at most; the longest known is forgotten first.

    Objects go by a 64-bit hash of their digest: where two share it, one of them may not be repaired.

    Args:
        capacity: objects, >= 0.
        age_s: for how long an object counts as stored.
        clock: tells the time.
    """

    def __init__(self, capacity: int, age_s: float, clock: Clock) -> None:
        self._capacity, self._age_s, self._clock = capacity, age_s, clock
        self._until_s: dict[tuple[int, int], float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def note(self, spec_group: int, digests: bytes, num_objects: int) -> None:
        """Take objects for stored; ``digests`` are laid end to end."""
        until_s = self._clock.now_s() + self._age_s
        for name in _names(digests, num_objects):
            self._until_s.pop((spec_group, name), None)
            self._until_s[spec_group, name] = until_s
        while len(self._until_s) > self._capacity:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, spec_group: int, digests: bytes, num_objects: int) -> None:
        """Take objects for stored no more."""
        for name in _names(digests, num_objects):
            self._until_s.pop((spec_group, name), None)

    def clear(self) -> None:
        """Forget all."""
        self._until_s.clear()

    def unknown(self, spec_group: int, digests: bytes, num_objects: int) -> NDArray[np.bool_]:
        """Return for each object whether the store has to be asked, shape (num_objects,)."""
        now_s = self._clock.now_s()
        return np.array(
            [self._until_s.get((spec_group, name), now_s) <= now_s for name in _names(digests, num_objects)],
            dtype=np.bool_,
        )


def _names(digests: bytes, num_objects: int) -> list[int]:
    width = len(digests) // max(num_objects, 1)
    return [hash(digests[start : start + width]) for start in range(0, len(digests), width or 1)]
