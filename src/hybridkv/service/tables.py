"""Block tables: which engine blocks make up the objects of a spec group.

Tables are lists of engine block ids, one a cache group, ``NULL_BLOCK`` where the engine holds no block.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs.group import SpecGroup
from hybridkv.specs.layout import Layout
from hybridkv.transfer.block_io import NULL_BLOCK, SKIP

Tables = Sequence[Sequence[int] | NDArray[np.int64]]
"""Engine block ids per cache group."""

Blocks = frozenset[tuple[int, int]]
"""Engine blocks: (cache group, block id)."""


def block_ids(group: SpecGroup, objects: NDArray[np.int64], tables: Tables) -> NDArray[np.int64]:
    """Return the blocks of objects, int64, shape (objects, members, k); null where a table is too short."""
    places = _places(group, objects)
    ids = np.full(
        (len(objects), len(group.cache_groups), group.blocks_per_object), NULL_BLOCK, dtype=np.int64
    )
    for member, cache_group in enumerate(group.cache_groups):
        table = np.asarray(tables[cache_group], dtype=np.int64)
        known = places < len(table)
        ids[:, member][known] = table[places[known]]
    return ids


def ids_to_load(
    group: SpecGroup, objects: NDArray[np.int64], tables: Tables, device_prefix: int
) -> NDArray[np.int64]:
    """Return the blocks that a load writes; the device's own are skipped, since other requests share them."""
    ids = block_ids(group, objects, tables)
    on_device = (_places(group, objects) + 1) * group.spec.block_size <= device_prefix
    loaded: NDArray[np.int64] = np.where(on_device[:, None, :] | (ids == NULL_BLOCK), SKIP, ids)
    return loaded


def saveable(
    group: SpecGroup, objects: NDArray[np.int64], tables: Tables, states: Sequence[int]
) -> NDArray[np.int64]:
    """Return the objects that the engine's blocks hold now: no null block, no unwritten state."""
    if group.spec.written_only_at_step_end:
        objects = objects[np.isin((objects + 1) * group.object_size, states)]
    is_held = (block_ids(group, objects, tables) != NULL_BLOCK).all(axis=(1, 2))
    held: NDArray[np.int64] = objects[is_held]
    return held


def leading(layout: Layout, objects: Sequence[NDArray[np.int64]], max_blocks: int) -> list[NDArray[np.int64]]:
    """Return per spec group those of the objects that end first and have no more blocks together."""
    ends = [(o + 1) * group.object_size for group, o in zip(layout.spec_groups, objects, strict=True)]
    sizes = [
        np.full(len(o), len(group.cache_groups) * group.blocks_per_object)
        for group, o in zip(layout.spec_groups, objects, strict=True)
    ]
    order = np.argsort(np.concatenate(ends), kind="stable")
    fits = np.zeros(len(order), np.bool_)
    fits[order] = np.cumsum(np.concatenate(sizes)[order]) <= max_blocks
    of_groups = np.split(fits, np.cumsum([len(o) for o in objects])[:-1])
    return [o[fit] for o, fit in zip(objects, of_groups, strict=True)]


def num_unfilled(
    layout: Layout, loads: Sequence[range], tables: Tables, *, device_prefix: int, hit: int
) -> int:
    """Return how many blocks from the device's prefix to the hit a load and the tables do not agree on."""
    wrong = 0
    for group, load in zip(layout.spec_groups, loads, strict=True):
        k, size = group.blocks_per_object, group.spec.block_size
        first, stop = device_prefix // size, hit // size
        for cache_group in group.cache_groups:
            table = np.asarray(tables[cache_group], dtype=np.int64)[:stop]
            held = np.zeros(stop, np.bool_)
            held[: len(table)] = table != NULL_BLOCK
            filled = np.zeros(stop, np.bool_)
            filled[load.start * k : load.stop * k] = True
            wrong += int(np.count_nonzero((held != filled)[first:]))
    return wrong


def named(group: SpecGroup, ids: NDArray[np.int64]) -> set[tuple[int, int]]:
    """Return the engine blocks among the ids of a spec group's objects."""
    found: set[tuple[int, int]] = set()
    for member, cache_group in enumerate(group.cache_groups):
        of_member = ids[:, member]
        found.update((cache_group, block) for block in of_member[of_member > NULL_BLOCK].tolist())
    return found


def _places(group: SpecGroup, objects: NDArray[np.int64]) -> NDArray[np.int64]:
    return objects[:, None] * group.blocks_per_object + np.arange(group.blocks_per_object)
