"""Which objects of a request's life a save wants of the engine's blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan.boundaries import Retention
from hybridkv.plan.save import GroupSave, plan_save
from hybridkv.service.jobs import Life
from hybridkv.service.tables import Tables, saveable
from hybridkv.specs.layout import Layout


def objects_to_save(
    layout: Layout,
    retention: Retention,
    life: Life,
    *,
    tokens: range,
    tables: Tables,
    states: Sequence[int],
    is_end: bool = False,
) -> list[NDArray[np.int64]]:
    """Return per spec group what is wanted of a run of tokens and lies in the engine's blocks, ascending.

    ::

        0            N                        stop
        |--prompt----|--output----------------|
         kept boundaries of the prompt
         multiples of the retention over both, once there is output
                               the last candidate, when the request ends

    Args:
        layout: of the model.
        retention: of the store.
        life: whose tokens they are.
        tokens: that are computed.
        tables: engine blocks a cache group.
        states: numbers of tokens after which the tables hold recurrent states.
        is_end: whether nothing follows.
    """
    start, stop = tokens.start, tokens.stop
    plans: list[tuple[GroupSave, ...]] = []
    if start <= life.prompt:
        plans.append(
            plan_save(
                layout,
                retention=retention,
                start=start,
                stop=min(stop, life.prompt),
                num_tokens=life.prompt,
                junction=life.junction,
            )
        )
    if stop > life.prompt:
        plans.append(plan_save(layout, retention=retention, start=start, stop=stop, num_tokens=None))
    if is_end:
        plans.append(plan_save(layout, retention=0, start=start, stop=stop, num_tokens=stop))
    return [
        saveable(group, np.unique(np.concatenate([one.indices() for one in of_group])), tables, states)
        for group, of_group in zip(layout.spec_groups, zip(*plans, strict=True), strict=True)
    ]
