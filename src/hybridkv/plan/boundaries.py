"""Boundaries: prefixes at which a prompt may be resumed, and those of them that a save keeps.

::

    0        align       2 align    ...    guard    resend  sibling    N
    |----------|-----------|-----------------|--------|--------|-------|
               candidates: every group's need, lookahead included, in complete objects
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.specs.layout import Layout

Retention = Literal["all"] | int
"""Which candidates a store keeps: ``"all"``, every multiple of n > 0 tokens, or 0 = only the ends."""


def check_retention(retention: object, layout: Layout) -> Retention:
    """Return the retention, where it fits the layout.

    Raises:
        ConfigError: it is neither ``"all"`` nor 0 nor a positive multiple of the alignment.
    """
    if retention == "all":
        return "all"
    if isinstance(retention, bool) or not isinstance(retention, int) or retention < 0:
        raise ConfigError(f"retention is {retention!r}; use 'all', 0 or a number of tokens")
    if retention % layout.alignment:
        below = retention // layout.alignment * layout.alignment
        near = [str(length) for length in (below, below + layout.alignment) if length]
        raise ConfigError(
            f"retention {retention} is not a multiple of the alignment {layout.alignment} of layout "
            f"{layout.name!r}; use {' or '.join(near)}"
        )
    return retention


def largest_candidate(layout: Layout, num_tokens: int) -> int:
    """Return the largest candidate of a prompt of ``num_tokens`` tokens, 0 where there is none.

    It is also the sibling boundary: where a longer prompt that begins with this one resumes.
    """
    return max(0, num_tokens - layout.margin) // layout.alignment * layout.alignment


def resend_boundary(layout: Layout, num_tokens: int) -> int:
    """Return the largest candidate <= N - 1: where the identical prompt resumes, 0 where there is none.

    The last token of a prompt is always computed again: its output is wanted.
    """
    return max(0, num_tokens - max(layout.margin, 1)) // layout.alignment * layout.alignment


def kept_boundaries(
    layout: Layout, retention: Retention, num_tokens: int, *, junction: int = 0
) -> NDArray[np.int64]:
    """Return the boundaries that a save of this prompt keeps, ascending.

    Args:
        layout: of the model.
        retention: already checked against the layout.
        num_tokens: N, the length of the whole prompt.
        junction: leading tokens known to be shared with other prompts, lookahead not subtracted; 0 = none.

    Returns:
        int64, shape (n,): the retention's multiples, the resend, the sibling and the guard boundary, and
        the largest candidate inside the junction.
    """
    sibling = largest_candidate(layout, num_tokens)
    if retention == "all":
        return np.arange(layout.alignment, sibling + 1, layout.alignment, dtype=np.int64)
    resend = resend_boundary(layout, num_tokens)
    ends = {sibling, resend, resend - layout.alignment}
    ends.add(largest_candidate(layout, min(junction, num_tokens)))
    kept = np.array([end for end in ends if end > 0], dtype=np.int64)
    if retention > 0:
        kept = np.concatenate((kept, np.arange(retention, sibling + 1, retention, dtype=np.int64)))
    return np.unique(kept)


def open_ended_boundaries(layout: Layout, retention: Retention, stop: int) -> NDArray[np.int64]:
    """Return the boundaries that matter for the first ``stop`` tokens while the prompt's end is unknown.

    Every multiple of the retention whose need starts below ``stop`` in a group that is not downward
    closed; no boundary that depends on the end.
    """
    step = layout.alignment if retention == "all" else retention
    if step == 0:
        return np.zeros(0, dtype=np.int64)
    last = max(0, stop - 1) // step * step  # no need starts above its boundary
    for group in layout.spec_groups:
        while not group.spec.downward_closed and group.spec.oldest_needed(last + step) < stop:
            last += step
    return np.arange(step, last + 1, step, dtype=np.int64)
