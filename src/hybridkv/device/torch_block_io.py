"""``BlockIO`` on torch tensors, on the CPU or on one CUDA device.

On CUDA a gather collects the payloads in one device buffer on a side stream and copies that buffer once into
pinned host memory; a scatter goes the other way on a second side stream, so that both directions of the link
are used at once. Streams wait for each other by events; no call but ``wait`` blocks the host.

::

    compute   ...writes blocks | event                        event | ...
    gather                       wait | collect | copy to host | event: done
    scatter     copy from host | wait for the second event          | write blocks | event: done

A call takes device memory for its payloads and once more for the largest part of them: batches bound it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_uint8
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import TransferError
from hybridkv.specs.layout import Layout
from hybridkv.transfer.block_pieces import (
    SKIP,
    BlockIds,
    BlockPiece,
    HostMemory,
    ObjectForm,
    Part,
    form_at,
    object_forms,
)

if TYPE_CHECKING:
    from hybridkv.transfer.block_io import PendingCopy

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchBlockIO:
    """``AsyncBlockIO`` on torch tensors. Methods may be called from several threads.

    On the CPU a started copy is done when the call returns. On CUDA, ``target`` and ``source`` are pinned.

    Args:
        layout: of the model.
        pieces: for each of ``layout.groups`` the pieces of its layers, in the order of the payload; their
            memories are contiguous tensors of any dtype, all on one device. Offsets count from the
            tensor's first element.
        compute_stream: the CUDA stream on which the engine reads and writes blocks; ``None`` = the current
            stream of the constructing thread. Copies come after all that it was given before the call.

    Raises:
        TransferError: on construction, the pieces are not those of the layout, leave their memory, or lie on
            several devices or on one that is neither CPU nor CUDA.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Sequence[BlockPiece[torch.Tensor]]],
        *,
        compute_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self._forms = object_forms(layout, pieces, _rows)
        devices = {part.rows.device for form in self._forms for part in form.parts}
        if len(devices) != 1 or next(iter(devices)).type not in {"cpu", "cuda"}:
            raise TransferError(f"pieces lie on {sorted(map(str, devices))}; give tensors of one CPU or GPU")
        (device,) = devices
        self._cuda = _CudaCopies(device, compute_stream) if device.type == "cuda" else None

    def gather(self, spec_group: int, blocks: BlockIds, target: HostMemory) -> None:
        """Copy objects out of block memory, see ``BlockIO``."""
        self.start_gather(spec_group, blocks, target).wait()

    def scatter(self, spec_group: int, blocks: BlockIds, source: HostMemory) -> None:
        """Copy objects into block memory, see ``BlockIO``."""
        self.start_scatter(spec_group, blocks, source).wait()

    def start_gather(self, spec_group: int, blocks: BlockIds, target: HostMemory) -> "PendingCopy":
        """Start to copy objects out of block memory, see ``AsyncBlockIO``."""
        form = form_at(self._forms, spec_group)
        form.check_gather(blocks)
        host = form.payloads(target, len(blocks), writable=True)
        if not len(blocks):
            return _Done()
        with _translated(), torch.inference_mode():
            if self._cuda is not None:
                return self._cuda.start_gather(form, blocks, host)
            _collect(form, _on_cpu([blocks])[0], _tensor(host))
        return _Done()

    def start_scatter(self, spec_group: int, blocks: BlockIds, source: HostMemory) -> "PendingCopy":
        """Start to copy objects into block memory, see ``AsyncBlockIO``."""
        form = form_at(self._forms, spec_group)
        form.check_scatter(blocks)
        host = form.payloads(source, len(blocks), writable=False)
        if not len(blocks):
            return _Done()
        with _translated(), torch.inference_mode():
            if self._cuda is not None:
                return self._cuda.start_scatter(form, blocks, host)
            _spread(form, [_on_cpu(places) for places in _places(form, blocks)], _tensor(host))
        return _Done()


class _Done:
    """A copy that has ended."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _CudaCopy:
    """A copy that ends with an event; keeps what it reads and writes until then."""

    def __init__(self, end: "torch.cuda.Event", *kept: object) -> None:
        self._end = end
        self._kept = kept

    def done(self) -> bool:
        with _translated():
            return bool(self._end.query())

    def wait(self) -> None:
        with _translated():
            self._end.synchronize()


class _CudaCopies:
    """Starts copies on two side streams of one device, each behind the compute stream."""

    def __init__(self, device: torch.device, compute_stream: "torch.cuda.Stream | None") -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device) if compute_stream is None else compute_stream
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def start_gather(
        self, form: ObjectForm[torch.Tensor], blocks: BlockIds, host: NDArray[np.uint8]
    ) -> _CudaCopy:
        target = _pinned(form, host)
        before = self._compute.record_event()
        with _enqueuing(self._out):
            self._out.wait_event(before)
            ids = self._upload(blocks)
            payloads = torch.empty(host.shape, dtype=torch.uint8, device=self._device)
            _collect(form, ids, payloads)
            target.copy_(payloads, non_blocking=True)
            return _CudaCopy(self._recorded(), host, target, payloads)

    def start_scatter(
        self, form: ObjectForm[torch.Tensor], blocks: BlockIds, host: NDArray[np.uint8]
    ) -> _CudaCopy:
        source = _pinned(form, host)
        before = self._compute.record_event()
        with _enqueuing(self._in):
            payloads = source.to(self._device, non_blocking=True)
            places = [[self._upload(numbers) for numbers in arrays] for arrays in _places(form, blocks)]
            self._in.wait_event(before)
            _spread(form, places, payloads)
            return _CudaCopy(self._recorded(), host, source, payloads)

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        # torch keeps the pinned copy until the stream has read it.
        pinned = torch.from_numpy(np.array(numbers)).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    @staticmethod
    def _recorded() -> "torch.cuda.Event":
        end = torch.cuda.Event(blocking=True)
        end.record()
        return end


@contextmanager
def _enqueuing(stream: "torch.cuda.Stream") -> Iterator[None]:
    """Enqueue on a stream; after an error nothing that was enqueued is under way any more."""
    with torch.cuda.stream(stream):
        try:
            yield
        except BaseException:
            # Whoever is told of the failure gives the blocks and the host memory back at once.
            stream.synchronize()
            raise


def pinned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Return new host memory that a CUDA device reads and writes directly, uint8, shape (num_bytes,).

    Raises:
        TransferError: there is no CUDA device, or not so much memory.
    """
    with _translated():
        memory: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _rows(piece: BlockPiece[torch.Tensor]) -> torch.Tensor:
    """Return a piece's blocks as uint8, shape (num_blocks, block_bytes)."""
    memory = piece.memory
    if not isinstance(memory, torch.Tensor) or not memory.is_contiguous():
        raise TransferError(
            f"the memory of a piece, a {type(memory).__name__}, is no contiguous tensor; give its storage "
            "as a tensor of bytes"
        )
    with _translated():
        memory_bytes = memory.reshape(-1).view(torch.uint8)
    if memory_bytes.numel() < piece.stop_bytes:
        raise TransferError(
            f"the memory of a piece has {memory_bytes.numel()} bytes; {piece.stop_bytes} are needed"
        )
    return memory_bytes.as_strided(
        (piece.num_blocks, piece.block_bytes),
        (piece.stride_bytes, 1),
        memory_bytes.storage_offset() + piece.offset_bytes,
    )


def _collect(form: ObjectForm[torch.Tensor], ids: torch.Tensor, payloads: torch.Tensor) -> None:
    """Copy blocks ``ids`` (n, members, k) into payloads (n, object_bytes) on their device."""
    for part in form.parts:
        rows, staged = _as_words(part.rows, _staged(form, part, payloads))
        staged.copy_(rows[ids[:, part.member]])


def _places(form: ObjectForm[torch.Tensor], blocks: BlockIds) -> Iterator[Sequence[NDArray[np.int64]]]:
    """Yield for each member the ids (n, k), or with a SKIP: ids, objects and places in the object, (n,) each.

    Computed on the host: a mask on the device would make the host wait for its count.
    """
    for member in range(len(form.num_blocks)):
        ids = blocks[:, member]
        writes = ids != SKIP
        yield [ids] if writes.all() else [ids[writes], *np.nonzero(writes)]


def _spread(
    form: ObjectForm[torch.Tensor], places: Sequence[Sequence[torch.Tensor]], payloads: torch.Tensor
) -> None:
    """Copy payloads (n, object_bytes) to the places of each member on their device."""
    for part in form.parts:
        rows, staged = _as_words(part.rows, _staged(form, part, payloads))
        ids, *kept = places[part.member]
        rows[ids] = staged[tuple(kept)] if kept else staged


def _staged(form: ObjectForm[torch.Tensor], part: Part[torch.Tensor], payloads: torch.Tensor) -> torch.Tensor:
    """Return a part's blocks in the payloads, shape (n, k, block_bytes), without copying."""
    return payloads[:, part.start : part.stop].unflatten(1, (form.k, part.block_bytes))


def _as_words(rows: torch.Tensor, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both seen as the widest words that fit: a kernel moves one element a thread."""
    sizes = [8]
    for tensor in (rows, staged):
        sizes += [tensor.data_ptr(), tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]]
    word = _WORDS[gcd(*sizes)]
    return rows.view(word), staged.view(word)


def _on_cpu(arrays: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(numbers)) for numbers in arrays]


def _tensor(host: NDArray[np.uint8]) -> torch.Tensor:
    """Return host memory as a tensor that is valid as long as ``host`` lives."""
    if host.flags.writeable:
        return torch.from_numpy(host)
    # torch knows no read-only tensors and warns of such memory; a source is only read.
    memory = (c_uint8 * host.nbytes).from_address(host.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(host.shape)


def _pinned(form: ObjectForm[torch.Tensor], host: NDArray[np.uint8]) -> torch.Tensor:
    tensor = _tensor(host)
    if not tensor.is_pinned():
        raise TransferError(
            f"group {form.name!r}: host memory is not pinned; take it from pinned_bytes or register it"
        )
    return tensor


@contextmanager
def _translated() -> Iterator[None]:
    """Turn torch's errors into ours."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"torch: {error}") from error
