"""Lookup: the longest prefix that every spec group can resume from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan.boundaries import resend_boundary
from hybridkv.plan.masks import Mask, needed_mask
from hybridkv.specs.layout import Layout


def lookup_masks(layout: Layout, num_tokens: int) -> tuple[Mask, ...]:
    """Return per spec group which of the prompt's complete objects any candidate <= N - 1 needs."""
    last = resend_boundary(layout, num_tokens)
    candidates = np.arange(layout.alignment, last + 1, layout.alignment, dtype=np.int64)
    return tuple(
        needed_mask(group, candidates, range(num_tokens // group.object_size)) for group in layout.spec_groups
    )


def longest_hit(layout: Layout, num_tokens: int, present: Sequence[NDArray[np.bool_]]) -> int:
    """Return the largest legal prefix <= N - 1 when it is known which objects are present.

    Args:
        layout: of the model.
        num_tokens: N, the prompt's length.
        present: per spec group, bool, shape (complete objects of the prompt,): present on every rank.
    """
    last = resend_boundary(layout, num_tokens)
    candidates = np.arange(layout.alignment, last + 1, layout.alignment, dtype=np.int64)
    legal = np.ones(len(candidates), dtype=np.bool_)
    for group, held in zip(layout.spec_groups, present, strict=True):
        starts, stops = group.spec.needed_bounds(candidates, group.lookahead)
        first, end = starts // group.object_size, -(-stops // group.object_size)
        absent_before = np.concatenate(([0], np.cumsum(~held)))
        legal &= absent_before[end] == absent_before[first]
    hits = candidates[legal]
    return int(hits[-1]) if len(hits) else 0


def full_run(layout: Layout, present: Sequence[NDArray[np.bool_]]) -> int:
    """Return the leading tokens that every downward-closed group holds; 0 without such a group."""
    runs = [
        int(np.argmin(np.append(held, False))) * group.object_size
        for group, held in zip(layout.spec_groups, present, strict=True)
        if group.spec.downward_closed
    ]
    return min(runs, default=0)
