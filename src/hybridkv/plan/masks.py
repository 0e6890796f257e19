"""Masks: which objects of a spec group a set of boundaries needs, from one run of objects a boundary."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs.group import SpecGroup

Mask = NDArray[np.bool_] | None
"""One bool an object of an interval; ``None`` = every object."""


def needed_mask(group: SpecGroup, boundaries: NDArray[np.int64], objects: range) -> Mask:
    """Return which of ``objects`` the union of the boundaries' needs covers, lookahead included.

    Args:
        group: the spec group.
        boundaries: int64, shape (n,), ascending, each > 0.
        objects: interval of object indices.

    Returns:
        bool, shape (len(objects),), or ``None`` when every object is covered or the interval is empty.
    """
    count = len(objects)
    starts, stops = group.needed_object_bounds(boundaries)
    first = np.clip(starts - objects.start, 0, count)
    last = np.clip(stops - objects.start, 0, count)
    opened = np.bincount(first, minlength=count + 1) - np.bincount(last, minlength=count + 1)
    mask: NDArray[np.bool_] = np.cumsum(opened[:count]) > 0
    return None if mask.all() else mask
