"""Save plans: which of the objects that a step completed some later request can use."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.plan.boundaries import (
    Retention,
    check_retention,
    kept_boundaries,
    open_ended_boundaries,
)
from hybridkv.plan.masks import Mask, needed_mask
from hybridkv.specs.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSave:
    """What to save of one spec group.

    Attributes:
        objects: indices of the objects that became complete.
        mask: which of them to save, shape (len(objects),); ``None`` = every one.
    """

    objects: range
    mask: Mask

    def indices(self) -> NDArray[np.int64]:
        """Return the object indices to save, int64, ascending."""
        if self.mask is None:
            return np.arange(self.objects.start, self.objects.stop, dtype=np.int64)
        return np.flatnonzero(self.mask) + self.objects.start


def plan_save(
    layout: Layout,
    *,
    retention: Retention,
    start: int,
    stop: int,
    num_tokens: int | None,
    junction: int = 0,
) -> tuple[GroupSave, ...]:
    """Plan the save of what became complete when the computed tokens grew from ``start`` to ``stop``.

    The wanted set counts all kept boundaries of the prompt, also those beyond ``stop``: an object that only
    a later boundary needs does not come back. Each group is saved up to its last complete object.

    Args:
        layout: of the model.
        retention: which candidates to keep beside the ends.
        start: tokens that were computed before, >= 0.
        stop: tokens computed now, >= start.
        num_tokens: N, the prompt's length, >= stop; ``None`` while unknown.
        junction: leading tokens known to be shared with other prompts; 0 = none.

    Returns:
        One entry a spec group.

    Raises:
        ConfigError: the retention does not fit the layout, or not 0 <= start <= stop <= N.
    """
    check_retention(retention, layout)
    if not 0 <= start <= stop <= (stop if num_tokens is None else num_tokens):
        raise ConfigError(f"a save of tokens {start} to {stop} of {num_tokens}; give 0 <= start <= stop <= N")
    if num_tokens is None:
        boundaries = open_ended_boundaries(layout, retention, stop)
    else:
        boundaries = kept_boundaries(layout, retention, num_tokens, junction=junction)
    plans = []
    for group in layout.spec_groups:
        objects = range(start // group.object_size, stop // group.object_size)
        mask = None if group.spec.downward_closed else needed_mask(group, boundaries, objects)
        plans.append(GroupSave(objects=objects, mask=mask))
    return tuple(plans)
