"""Cache groups, as the engine has them, and spec groups, as hybridkv plans them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import SpecError
from hybridkv.specs.base import CacheSpec, require_int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table in the engine.

    Attributes:
        name: for messages and reports.
        spec: the kind of attention with its sizes.
        layers: number of layers, >= 1.
        layer_block_bytes: bytes of one block of one layer over all tensor-parallel ranks, >= 1.
        shards: into how many parts tensor parallelism can split those bytes (the KV heads); 1 = every
            rank holds equal bytes, as with MLA.
        lookahead: tokens past a boundary that speculative decoding must find here, >= 0.
        blocks_per_object: consecutive blocks under one key (k), > 1 only where the kind is downward closed.
        prefix_cacheable: ``False`` for scratch groups: they take part in nothing.
    """

    name: str
    spec: CacheSpec
    layers: int = 1
    layer_block_bytes: int = 1
    shards: int = 1
    lookahead: int = 0
    blocks_per_object: int = 1
    prefix_cacheable: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("layers", 1),
            ("layer_block_bytes", 1),
            ("shards", 1),
            ("lookahead", 0),
            ("blocks_per_object", 1),
        ):
            require_int(f"group {self.name!r}", name, getattr(self, name), least)
        if not isinstance(self.prefix_cacheable, bool):
            raise SpecError(
                f"group {self.name!r}: prefix_cacheable is {self.prefix_cacheable!r}; give true or false"
            )
        if self.blocks_per_object > 1 and not self.spec.downward_closed:
            raise SpecError(
                f"group {self.name!r}: blocks_per_object is {self.blocks_per_object} on kind "
                f"{self.spec.kind!r}; only full attention and MLA may pack blocks, set it to 1"
            )

    def ranks(self, tp: int) -> int:
        """Return how many ranks of ``tp`` hold bytes that differ.

        Raises:
            SpecError: the shards can be neither split over nor repeated on that many ranks.
        """
        if self.shards != 1 and tp % self.shards and self.shards % tp:
            raise SpecError(
                f"group {self.name!r}: {self.shards} shards (KV heads) do not fit {tp} tensor-parallel "
                f"ranks; use a multiple or a divisor of {self.shards}"
            )
        return min(tp, self.shards)


@dataclass(frozen=True, kw_only=True)
class SpecGroup:
    """Cache groups with equal spec, lookahead, object size and shards: the unit of planning and of keys.

    Attributes:
        index: position in ``Layout.spec_groups``, part of every key.
        name: of the first member, and how many there are.
        spec: shared by all members.
        lookahead: tokens, shared by all members.
        blocks_per_object: k, shared by all members.
        cache_groups: indices of the members in ``Layout.groups``.
        num_ranks: rank namespaces: ranks whose bytes differ.
        object_bytes: payload of one object on one rank, all layers of all members.
    """

    index: int
    name: str
    spec: CacheSpec
    lookahead: int
    blocks_per_object: int
    cache_groups: tuple[int, ...]
    num_ranks: int
    object_bytes: int

    @cached_property
    def object_size(self) -> int:
        """Tokens of one object; for the planner this is the group's block size."""
        return self.spec.block_size * self.blocks_per_object

    @cached_property
    def margin(self) -> int:
        """Tokens past a boundary that must be complete for it: the lookahead in whole objects."""
        ahead = self.needed_objects(self.object_size, self.lookahead).stop * self.object_size
        return max(0, ahead - self.object_size)

    def needed_object_bounds(
        self, prefixes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return start and stop of ``needed_objects`` for many prefixes at once, lookahead included.

        Args:
            prefixes: int64, shape (n,), each a multiple of ``object_size`` and > 0.

        Returns:
            Two int64 arrays of shape (n,); where nothing is needed, they are equal.
        """
        starts, stops = self.spec.needed_bounds(prefixes, self.lookahead)
        return starts // self.object_size, -(-stops // self.object_size)

    def needed_objects(self, prefix: int, lookahead: int) -> range:
        """Return the objects that cover ``spec.needed(prefix, lookahead)``, as a half-open range."""
        need = self.spec.needed(prefix, lookahead)
        if not need:
            return range(0)
        return range(need.start // self.object_size, -(-need.stop // self.object_size))
