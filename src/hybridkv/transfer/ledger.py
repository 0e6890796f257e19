"""The save ledger: what one life of a request has really stored, object by object."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NOT_STORED, _ON_ITS_WAY, _STORED = 0, 1, 2


class Ledger:
    """States of one request's objects, per spec group; only what the store has confirmed counts as stored.

    Args:
        num_objects: per spec group, how many objects the request can complete.
    """

    def __init__(self, num_objects: Sequence[int]) -> None:
        self._states = [np.zeros(count, dtype=np.uint8) for count in num_objects]

    def unsaved(self, spec_group: int, objects: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the objects that are neither stored nor on their way."""
        free: NDArray[np.int64] = objects[self._states[spec_group][objects] == _NOT_STORED]
        return free

    def claim(self, spec_group: int, objects: NDArray[np.int64]) -> None:
        """Take unsaved objects to be on their way."""
        self._states[spec_group][objects] = _ON_ITS_WAY

    def settle(self, spec_group: int, objects: NDArray[np.int64], stored: NDArray[np.bool_]) -> None:
        """Note which objects are stored on every rank; the others are free to be claimed again."""
        self._states[spec_group][objects] = np.where(stored, _STORED, _NOT_STORED)

    def watermark(self, spec_group: int) -> int:
        """Return how many leading objects are stored."""
        states = self._states[spec_group]
        behind = np.flatnonzero(states != _STORED)
        return int(behind[0]) if len(behind) else len(states)
