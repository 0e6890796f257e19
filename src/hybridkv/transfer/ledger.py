"""The save ledger: what one life of a request has really stored, object by object."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NOT_STORED, _ON_ITS_WAY, _STORED = 0, 1, 2


class Ledger:
    """States of one request's objects, per spec group; only what the store has confirmed counts as stored.

    Args:
        num_objects: per spec group, how many objects the request can complete.
        tries: failed saves of an object after which it is given up, 1 to 255.
    """

    def __init__(self, num_objects: Sequence[int], *, tries: int) -> None:
        self._states = [np.zeros(count, dtype=np.uint8) for count in num_objects]
        self._tries_left = [np.full(count, tries, dtype=np.uint8) for count in num_objects]
        self._tries = tries

    def grow(self, num_objects: Sequence[int]) -> None:
        """Count more objects per spec group, unsaved; those that are there keep their states."""
        for idx, count in enumerate(num_objects):
            more = max(0, count - len(self._states[idx]))
            self._states[idx] = np.pad(self._states[idx], (0, more))
            self._tries_left[idx] = np.pad(self._tries_left[idx], (0, more), constant_values=self._tries)

    def unsaved(self, spec_group: int, objects: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the objects that are neither stored, nor on their way, nor given up."""
        is_open = (self._states[spec_group] == _NOT_STORED) & (self._tries_left[spec_group] > 0)
        found: NDArray[np.int64] = objects[is_open[objects]]
        return found

    def claim(self, spec_group: int, objects: NDArray[np.int64]) -> None:
        """Take unsaved objects to be on their way."""
        self._states[spec_group][objects] = _ON_ITS_WAY

    def settle(self, spec_group: int, objects: NDArray[np.int64], stored: NDArray[np.bool_]) -> None:
        """Note which of the objects on their way are stored on every rank; the others have failed once."""
        self._states[spec_group][objects] = np.where(stored, _STORED, _NOT_STORED)
        self._tries_left[spec_group][objects[~stored]] -= 1

    def watermark(self, spec_group: int) -> int:
        """Return how many leading objects are stored."""
        states = self._states[spec_group]
        behind = np.flatnonzero(states != _STORED)
        return int(behind[0]) if len(behind) else len(states)
