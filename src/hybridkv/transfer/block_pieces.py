"""Where blocks lie in an engine's memory, and how the objects made of them lie in a payload.

Each layer's blocks lie in memory as one or more *pieces* (K and V apart: two pieces). A payload holds the
members of a spec group in its order, in each member the pieces, in each piece the k blocks. With members
A (pieces K and V) and B (one piece) and k = 2, the object of blocks ``[[a0, a1], [b0, b1]]`` is::

    | A.K of a0 | A.K of a1 | A.V of a0 | A.V of a1 | B of b0 | B of b1 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import TransferError
from hybridkv.specs.group import CacheGroup, SpecGroup
from hybridkv.specs.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

NULL_BLOCK = 0
"""The engine's block without content: never read, never written."""

SKIP = -1
"""In a scatter, instead of a block id: this part of the object goes nowhere."""

BlockIds = NDArray[np.int64]
"""Engine block ids of a batch of objects, int64, shape (objects, members, k)."""

HostMemory: TypeAlias = "Buffer | NDArray[np.uint8]"
"""A contiguous buffer that the CPU can address."""

Memory = TypeVar("Memory")
Memory_co = TypeVar("Memory_co", covariant=True)
Rows = TypeVar("Rows")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPiece(Generic[Memory_co]):
    """Where the blocks of one layer, or of one part of it, lie: block b begins at offset + b * stride.

    Attributes:
        memory: that holds the blocks, perhaps beside others'.
        block_bytes: of one block in this piece on this rank, >= 1.
        stride_bytes: from one block's first byte to the next block's, >= block_bytes.
        offset_bytes: from the memory's first byte to block 0, >= 0.
        num_blocks: blocks that the piece holds, the null block counted, >= 1.

    Raises:
        TransferError: on construction, a number is out of its range.
    """

    memory: Memory_co
    block_bytes: int
    stride_bytes: int
    offset_bytes: int
    num_blocks: int

    def __post_init__(self) -> None:
        for field, least in (("block_bytes", 1), ("stride_bytes", 1), ("offset_bytes", 0), ("num_blocks", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TransferError(f"piece: {field} is {value!r}; give an integer >= {least}")
        if self.stride_bytes < self.block_bytes:
            raise TransferError(
                f"piece: stride_bytes {self.stride_bytes} is below block_bytes {self.block_bytes}; "
                "blocks may not overlap"
            )

    @property
    def stop_bytes(self) -> int:
        """Bytes from the memory's first byte to the end of the last block."""
        return self.offset_bytes + (self.num_blocks - 1) * self.stride_bytes + self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part(Generic[Rows]):
    """One piece's place in the payload.

    Attributes:
        member: index of the cache group in its spec group.
        start: first byte of the k blocks in the payload.
        stop: end of them.
        block_bytes: of each.
        rows: the piece's blocks as an array, uint8, shape (num_blocks, block_bytes).
    """

    member: int
    start: int
    stop: int
    block_bytes: int
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectForm(Generic[Rows]):
    """How the objects of one spec group lie in block memory and in a payload.

    Attributes:
        name: of the spec group.
        object_bytes: of a payload on one rank.
        k: blocks an object.
        num_blocks: of each member, int64, shape (members, 1).
        parts: of the payload, in order; together they fill it.
    """

    name: str
    object_bytes: int
    k: int
    num_blocks: NDArray[np.int64]
    parts: tuple[Part[Rows], ...]

    def check_gather(self, blocks: BlockIds) -> None:
        """Refuse ids that are no blocks with content.

        Raises:
            TransferError: naming the first wrong id.
        """
        self._check_shape(blocks)
        self._refuse_first(blocks, (blocks <= NULL_BLOCK) | (blocks >= self.num_blocks))

    def check_scatter(self, blocks: BlockIds) -> None:
        """Refuse ids that may not be written, and an id that stands twice in a member.

        Raises:
            TransferError: naming the first wrong id.
        """
        self._check_shape(blocks)
        writes = blocks != SKIP
        self._refuse_first(blocks, writes & ((blocks <= NULL_BLOCK) | (blocks >= self.num_blocks)))
        for member in range(len(self.num_blocks)):
            ids = np.sort(blocks[:, member][writes[:, member]])
            twins = ids[1:][ids[1:] == ids[:-1]]
            if twins.size:
                raise TransferError(
                    f"group {self.name!r}: block {twins[0]} of member {member} is written twice in one "
                    "scatter; give each block to one object"
                )

    def _check_shape(self, blocks: BlockIds) -> None:
        expected = (len(self.num_blocks), self.k)
        if not isinstance(blocks, np.ndarray) or blocks.dtype != np.int64:
            found = blocks.dtype if isinstance(blocks, np.ndarray) else type(blocks).__name__
            raise TransferError(f"group {self.name!r}: block ids are {found}; give an int64 array")
        if blocks.shape[1:] != expected:
            raise TransferError(
                f"group {self.name!r}: block ids have shape {blocks.shape}; give (objects, members, k) = "
                f"(objects, {expected[0]}, {expected[1]})"
            )

    def _refuse_first(self, blocks: BlockIds, wrong: NDArray[np.bool_]) -> None:
        if not wrong.any():
            return
        obj, member, at = np.argwhere(wrong)[0].tolist()
        block = int(blocks[obj, member, at])
        names = {NULL_BLOCK: "the null block", SKIP: "SKIP, which a gather cannot read"}
        last = self.num_blocks[member, 0] - 1
        raise TransferError(
            f"group {self.name!r}: object {obj}, member {member}: block {at} is {names.get(block, block)}; "
            f"give ids from 1 to {last}"
        )

    def payloads(self, buffer: HostMemory, count: int, *, writable: bool) -> NDArray[np.uint8]:
        """Return host memory as ``count`` payloads, uint8, shape (count, object_bytes), without copying.

        Raises:
            TransferError: the buffer is too small, not contiguous, or read-only and is to be written.
        """
        role = "target" if writable else "source"
        owner = f"group {self.name!r}: the {role}"
        memory = host_bytes(buffer, count * self.object_bytes, owner=owner, writable=writable)
        return memory.reshape(count, self.object_bytes)


def object_forms(
    layout: Layout,
    pieces: Sequence[Sequence[BlockPiece[Memory]]],
    rows_of: Callable[[BlockPiece[Memory]], Rows],
) -> tuple[ObjectForm[Rows], ...]:
    """Return the form of each spec group's objects.

    Args:
        layout: of the model.
        pieces: for each of ``layout.groups`` the pieces of its layers, in the order of the payload; those of
            a group that is not prefix-cacheable are not used.
        rows_of: returns a piece's ``Part.rows`` or raises TransferError when it leaves its memory.

    Raises:
        TransferError: the pieces are not those of the layout.
    """
    if len(pieces) != len(layout.groups):
        raise TransferError(
            f"layout {layout.name!r}: pieces of {len(pieces)} cache groups; give those of all "
            f"{len(layout.groups)}"
        )
    return tuple(_object_form(layout, group, pieces, rows_of) for group in layout.spec_groups)


def form_at(forms: Sequence[ObjectForm[Rows]], spec_group: int) -> ObjectForm[Rows]:
    """Return the form of a spec group.

    Raises:
        TransferError: there is no such spec group.
    """
    if not 0 <= spec_group < len(forms):
        raise TransferError(f"spec group is {spec_group!r}; the layout has 0 to {len(forms) - 1}")
    return forms[spec_group]


def _object_form(
    layout: Layout,
    group: SpecGroup,
    pieces: Sequence[Sequence[BlockPiece[Memory]]],
    rows_of: Callable[[BlockPiece[Memory]], Rows],
) -> ObjectForm[Rows]:
    parts: list[Part[Rows]] = []
    start = 0
    for member, idx in enumerate(group.cache_groups):
        _check_member(layout.groups[idx], pieces[idx], group.num_ranks)
        for piece in pieces[idx]:
            stop = start + group.blocks_per_object * piece.block_bytes
            rows = rows_of(piece)
            parts.append(
                Part(member=member, start=start, stop=stop, block_bytes=piece.block_bytes, rows=rows)
            )
            start = stop
    return ObjectForm(
        name=group.name,
        object_bytes=group.object_bytes,
        k=group.blocks_per_object,
        num_blocks=np.array([[pieces[idx][0].num_blocks] for idx in group.cache_groups], dtype=np.int64),
        parts=tuple(parts),
    )


def _check_member(group: CacheGroup, pieces: Sequence[BlockPiece[Memory]], num_ranks: int) -> None:
    found = sum(piece.block_bytes for piece in pieces)
    expected = group.layers * group.layer_block_bytes
    if found * num_ranks != expected:
        raise TransferError(
            f"group {group.name!r}: its pieces hold {found} bytes a block; the layout says {expected} over "
            f"{num_ranks} ranks"
        )
    counts = {piece.num_blocks for piece in pieces}
    if len(counts) != 1:
        raise TransferError(
            f"group {group.name!r}: its pieces hold {sorted(counts)} blocks; layers of one block table hold "
            "equally many"
        )


def host_bytes(buffer: HostMemory, num_bytes: int, *, owner: str, writable: bool) -> NDArray[np.uint8]:
    """Return the first ``num_bytes`` bytes of a contiguous buffer, uint8, without copying.

    Raises:
        TransferError: naming ``owner``: too small, not contiguous, or read-only and ``writable`` is asked.
    """
    try:
        view = memoryview(cast("Buffer", buffer))
    except (TypeError, ValueError, BufferError) as error:
        raise TransferError(f"{owner}: {type(buffer).__name__} exports no memory: {error}") from error
    if not view.c_contiguous or "O" in view.format:
        raise TransferError(f"{owner} is not C-contiguous or holds Python objects; give plain bytes")
    if writable and view.readonly:
        raise TransferError(f"{owner} is read-only; give memory that can be written")
    if view.nbytes < num_bytes:
        raise TransferError(f"{owner} has {view.nbytes} bytes; {num_bytes} are needed")
    return np.frombuffer(view, dtype=np.uint8, count=num_bytes)
