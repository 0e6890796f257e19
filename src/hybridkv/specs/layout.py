"""A layout: all cache groups of one model as one engine holds them, checked at construction."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

from hybridkv.errors import SpecError
from hybridkv.specs.base import MAX_SIZE, require_int
from hybridkv.specs.group import CacheGroup, SpecGroup

MAX_TP = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The cache groups of a model and what follows from them.

    Attributes:
        name: for messages and reports.
        groups: the engine's cache groups, in the engine's order.
        hash_unit: tokens per block hash; 0 = the greatest common divisor of the block sizes.
        tp: tensor-parallel ranks, >= 1.
        source: where the numbers come from.

    Raises:
        SpecError: on construction; the message names the group, the value and the remedy.
    """

    name: str
    groups: tuple[CacheGroup, ...]
    hash_unit: int = 0
    tp: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for field, least in (("hash_unit", 0), ("tp", 1)):
            require_int(f"layout {self.name!r}", field, getattr(self, field), least)
        if self.tp > MAX_TP:
            raise SpecError(f"layout {self.name!r}: tp is {self.tp}; give at most {MAX_TP}")
        names = [group.name for group in self.groups]
        if twins := {name for name in names if names.count(name) > 1}:
            raise SpecError(f"layout {self.name!r}: group name {min(twins)!r} stands twice; rename one")
        cacheable = [group for group in self.groups if group.prefix_cacheable]
        if not cacheable:
            raise SpecError(f"layout {self.name!r} has no prefix-cacheable group; add one")
        if self.hash_unit == 0:
            object.__setattr__(self, "hash_unit", gcd(*(group.spec.block_size for group in cacheable)))
        self._check_sizes(cacheable)

    def _check_sizes(self, cacheable: list[CacheGroup]) -> None:
        for group in cacheable:
            if group.spec.block_size % self.hash_unit:
                raise SpecError(
                    f"group {group.name!r}: block_size {group.spec.block_size} is not a multiple of the hash "
                    f"unit {self.hash_unit}; use a hash unit that divides every block size"
                )
        if self.alignment > MAX_SIZE:
            raise SpecError(
                f"layout {self.name!r}: the least common multiple of its object sizes is above {MAX_SIZE}; "
                "use block sizes that have common factors"
            )

    @cached_property
    def spec_groups(self) -> tuple[SpecGroup, ...]:
        """The units of planning: cache groups merged where needs, object size and ranks are equal."""
        members: dict[object, list[int]] = {}
        for idx, group in enumerate(self.groups):
            if group.prefix_cacheable:
                same = (group.spec, group.lookahead, group.blocks_per_object, group.shards)
                members.setdefault(same, []).append(idx)
        return tuple(self._spec_group(index, indices) for index, indices in enumerate(members.values()))

    def _spec_group(self, index: int, indices: list[int]) -> SpecGroup:
        groups = [self.groups[i] for i in indices]
        first = groups[0]
        num_ranks = first.ranks(self.tp)
        total = sum(group.layers * group.layer_block_bytes for group in groups) * first.blocks_per_object
        if total % num_ranks:
            raise SpecError(
                f"group {first.name!r}: {total} bytes an object do not divide over {num_ranks} ranks; "
                "correct layer_block_bytes"
            )
        return SpecGroup(
            index=index,
            name=first.name if len(groups) == 1 else f"{first.name} x{len(groups)}",
            spec=first.spec,
            lookahead=first.lookahead,
            blocks_per_object=first.blocks_per_object,
            cache_groups=tuple(indices),
            num_ranks=num_ranks,
            object_bytes=total // num_ranks,
        )

    @cached_property
    def alignment(self) -> int:
        """Tokens: every boundary is a multiple of this, the least common multiple of the object sizes."""
        return lcm(*(group.object_size for group in self.spec_groups))

    @cached_property
    def margin(self) -> int:
        """Tokens past a boundary that must be complete for it in every group."""
        return max(group.margin for group in self.spec_groups)

    def with_object_tokens(self, tokens: int) -> "Layout":
        """Return this layout with objects of ``tokens`` tokens in every full-attention and MLA group.

        A group whose block already holds that many tokens stays as it is.

        Raises:
            SpecError: the tokens are no multiple of such a group's block size.
        """
        return replace(self, groups=tuple(_packed(self.groups, tokens)))

    def with_tp(self, tp: int) -> "Layout":
        """Return this layout on ``tp`` tensor-parallel ranks."""
        return replace(self, tp=tp)


def _packed(groups: Iterable[CacheGroup], tokens: int) -> Iterable[CacheGroup]:
    for group in groups:
        block_size = group.spec.block_size
        if not group.spec.downward_closed or block_size >= tokens > 0:
            yield group
        elif tokens < 1 or tokens % block_size:
            raise SpecError(
                f"group {group.name!r}: objects of {tokens} tokens are no multiple of block_size "
                f"{block_size}; use a multiple"
            )
        else:
            yield replace(group, blocks_per_object=tokens // block_size)
