"""The hit when it is known which objects are present: the definition, spelled out over all candidates."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan.boundaries import resend_boundary
from hybridkv.plan.masks import Mask, needed_mask
from hybridkv.specs.layout import Layout


def lookup_candidates(layout: Layout, num_tokens: int) -> NDArray[np.int64]:
    """Return the boundaries at which a prompt of N tokens may resume: candidates <= N - 1, ascending."""
    return np.arange(
        layout.alignment, resend_boundary(layout, num_tokens) + 1, layout.alignment, dtype=np.int64
    )


def lookup_masks(layout: Layout, num_tokens: int) -> tuple[Mask, ...]:
    """Return per spec group which of the prompt's complete objects any candidate <= N - 1 needs."""
    candidates = lookup_candidates(layout, num_tokens)
    return tuple(
        needed_mask(group, candidates, range(num_tokens // group.object_size)) for group in layout.spec_groups
    )


def longest_hit(layout: Layout, num_tokens: int, present: Sequence[NDArray[np.bool_]]) -> int:
    """Return the largest legal prefix <= N - 1, 0 where there is none.

    Args:
        layout: of the model.
        num_tokens: N, the prompt's length.
        present: per spec group, bool, shape (complete objects of the prompt,): present on every rank.
    """
    candidates = lookup_candidates(layout, num_tokens)
    legal = np.ones(len(candidates), dtype=np.bool_)
    for group, held in zip(layout.spec_groups, present, strict=True):
        first, end = group.needed_object_bounds(candidates)
        absent_before = np.concatenate(([0], np.cumsum(~held)))
        legal &= absent_before[end] == absent_before[first]
    hits = candidates[legal]
    return int(hits[-1]) if len(hits) else 0
