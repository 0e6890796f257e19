"""A small layout with real block memory, for tests of transfers."""

import numpy as np

from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.transfer.block_io import BlockPiece, NumpyBlockIO
from hybridkv.transfer.moves import GroupMove

NUM_BLOCKS = 40


def small_layout(k=1, tp=1):
    return Layout(
        name="small",
        groups=(
            CacheGroup(
                name="full",
                spec=Full(block_size=16),
                layers=2,
                layer_block_bytes=128,
                shards=2,
                blocks_per_object=k,
            ),
            CacheGroup(
                name="window", spec=SlidingWindow(block_size=16, window=32), layer_block_bytes=64, shards=2
            ),
        ),
        tp=tp,
    )


class Device:
    """Block memory of one rank: an array per layer, filled with a pattern of layer, block and byte."""

    def __init__(self, layout, seed=0):
        self.layout = layout
        self.arrays = [
            [
                np.zeros((NUM_BLOCKS, group.layer_block_bytes // min(layout.tp, group.shards)), np.uint8)
                for _ in range(group.layers)
            ]
            for group in layout.groups
        ]
        self.fill(seed)
        pieces = [
            [
                BlockPiece(
                    memory=array,
                    block_bytes=array.shape[1],
                    stride_bytes=array.shape[1],
                    offset_bytes=0,
                    num_blocks=NUM_BLOCKS,
                )
                for array in arrays
            ]
            for arrays in self.arrays
        ]
        self.io = NumpyBlockIO(layout, pieces)

    def fill(self, seed):
        rng = np.random.default_rng(seed)
        for array in self.every_array():
            array[:] = rng.integers(0, 256, array.shape, dtype=np.uint8)

    def every_array(self):
        return [array for arrays in self.arrays for array in arrays]

    def copy(self):
        return [array.copy() for array in self.every_array()]


def move(layout, spec_group, keys, blocks):
    """A ``GroupMove`` of objects whose blocks are given as lists, one a member."""
    group = layout.spec_groups[spec_group]
    ids = np.array(blocks, dtype=np.int64).reshape(
        len(keys), len(group.cache_groups), group.blocks_per_object
    )
    return GroupMove(spec_group=spec_group, object_bytes=group.object_bytes, keys=keys, blocks=ids)
