"""Copies between an engine's block memory and contiguous host memory.

``block_pieces`` draws how a payload is made of blocks. Everything is checked before a byte moves.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hybridkv.specs.layout import Layout
from hybridkv.transfer.block_pieces import (
    NULL_BLOCK,
    SKIP,
    BlockIds,
    BlockPiece,
    HostMemory,
    ObjectForm,
    form_at,
    host_bytes,
    object_forms,
)

__all__ = [
    "NULL_BLOCK",
    "SKIP",
    "AsyncBlockIO",
    "BlockIO",
    "BlockIds",
    "BlockPiece",
    "HostMemory",
    "NumpyBlockIO",
    "PendingCopy",
]

CHUNK_BYTES = 1 << 20
"""Bytes copied by one numpy call, so that what a fancy index reads is still cached when it is written."""


class BlockIO(Protocol):
    """Moves objects between block memory and host memory. Methods may be called from several threads."""

    def gather(self, spec_group: int, blocks: BlockIds, target: HostMemory) -> None:
        """Copy objects out of block memory; when the call returns, the blocks may be reused.

        Args:
            spec_group: index of the spec group in the layout.
            blocks: int64, shape (objects, members, k): for each object and each cache group of the spec
                group, in its order, the k consecutive blocks of the object; no ``SKIP``.
            target: contiguous, writable host memory; receives the payloads end to end from its start. What
                lies behind them is left alone.

        Raises:
            TransferError: an id, a shape or the target does not fit; no byte was moved.
        """

    def scatter(self, spec_group: int, blocks: BlockIds, source: HostMemory) -> None:
        """Copy objects into block memory; when the call returns, the engine may read the blocks.

        Args:
            spec_group: index of the spec group in the layout.
            blocks: as in ``gather``; ``SKIP`` where a part of an object goes nowhere, any other id at most
                once in a member.
            source: contiguous host memory that begins with the payloads end to end.

        Raises:
            TransferError: an id, a shape or the source does not fit; no byte was moved.
        """


class PendingCopy(Protocol):
    """A copy under way. Its owner keeps it until it is done; it keeps the host memory alive."""

    def done(self) -> bool:
        """Return whether the copy has ended; never blocks.

        Raises:
            TransferError: the copy failed.
        """

    def wait(self) -> None:
        """Block the calling thread until the copy has ended.

        Raises:
            TransferError: the copy failed.
        """


class AsyncBlockIO(BlockIO, Protocol):
    """A BlockIO that can also start a copy and return.

    Until the copy is done, neither the blocks nor the host memory are touched by anyone else.
    """

    def start_gather(self, spec_group: int, blocks: BlockIds, target: HostMemory) -> PendingCopy:
        """Start a ``gather``; same arguments and refusals."""

    def start_scatter(self, spec_group: int, blocks: BlockIds, source: HostMemory) -> PendingCopy:
        """Start a ``scatter``; same arguments and refusals."""


class NumpyBlockIO:
    """``BlockIO`` on memory that the CPU can address.

    Args:
        layout: of the model.
        pieces: for each of ``layout.groups`` the pieces of its layers, in the order of the payload; the
            memory of each is a writable, contiguous buffer.

    Raises:
        TransferError: on construction, the pieces are not those of the layout or leave their memory.
    """

    def __init__(self, layout: Layout, pieces: Sequence[Sequence[BlockPiece[HostMemory]]]) -> None:
        self._forms = object_forms(layout, pieces, _rows)

    def gather(self, spec_group: int, blocks: BlockIds, target: HostMemory) -> None:
        """Copy objects out of block memory, see ``BlockIO``."""
        form = form_at(self._forms, spec_group)
        form.check_gather(blocks)
        payloads = form.payloads(target, len(blocks), writable=True)
        for ids, rows, staged in _chunks(form, blocks, payloads):
            staged[...] = rows[ids]

    def scatter(self, spec_group: int, blocks: BlockIds, source: HostMemory) -> None:
        """Copy objects into block memory, see ``BlockIO``."""
        form = form_at(self._forms, spec_group)
        form.check_scatter(blocks)
        payloads = form.payloads(source, len(blocks), writable=False)
        for ids, rows, staged in _chunks(form, blocks, payloads):
            writes = ids != SKIP
            if writes.all():
                rows[ids] = staged
            else:
                rows[ids[writes]] = staged[writes]


def _rows(piece: BlockPiece[HostMemory]) -> NDArray[np.uint8]:
    memory = host_bytes(piece.memory, piece.stop_bytes, owner="the memory of a piece", writable=True)
    shape, strides = (piece.num_blocks, piece.block_bytes), (piece.stride_bytes, 1)
    return as_strided(memory[piece.offset_bytes :], shape, strides)


def _chunks(
    form: ObjectForm[NDArray[np.uint8]], blocks: BlockIds, payloads: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield ids (n, k), the rows they name, and those blocks' places in the payloads (n, k, block_bytes)."""
    for part in form.parts:
        step = max(1, CHUNK_BYTES // (part.stop - part.start))
        for first in range(0, len(blocks), step):
            some = slice(first, first + step)
            ids = blocks[some, part.member]
            yield ids, part.rows, payloads[some, part.start : part.stop].reshape(*ids.shape, part.block_bytes)
