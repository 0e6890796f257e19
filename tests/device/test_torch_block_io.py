from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.device import torch_block_io
from hybridkv.device.torch_block_io import TorchBlockIO, pinned_bytes
from hybridkv.errors import TransferError
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.transfer.block_io import SKIP, BlockPiece


def layout_of(members, k):
    """Cache groups of one spec group, each given as its bytes a block."""
    groups = tuple(
        CacheGroup(name=f"m{idx}", spec=Full(block_size=16), layer_block_bytes=size, blocks_per_object=k)
        for idx, size in enumerate(members)
    )
    return Layout(name="test", groups=groups)


class Case:
    """Pieces of (block_bytes, gap, offset) for each member, and their bytes in numpy for the oracle."""

    def __init__(self, members, k, num_blocks, *, seed=0, device="cpu"):
        rng = np.random.default_rng(seed)
        self.k = k
        self.shapes = [shape for pieces in members for shape in pieces]
        self.owners = [member for member, pieces in enumerate(members) for _ in pieces]
        self.before = [
            rng.integers(0, 256, offset + num_blocks * (block + gap), dtype=np.uint8)
            for block, gap, offset in self.shapes
        ]
        self.tensors = [torch.from_numpy(memory.copy()).to(device) for memory in self.before]
        pieces = [[] for _ in members]
        for owner, tensor, (block, gap, offset) in zip(self.owners, self.tensors, self.shapes, strict=True):
            piece = BlockPiece(
                memory=tensor,
                block_bytes=block,
                stride_bytes=block + gap,
                offset_bytes=offset,
                num_blocks=num_blocks,
            )
            pieces[owner].append(piece)
        sizes = [sum(block for block, _, _ in shapes) for shapes in members]
        self.object_bytes = sum(sizes) * k
        self.layout, self.pieces = layout_of(sizes, k), pieces
        self.io = TorchBlockIO(self.layout, pieces)

    def walk(self, ids):
        """Yield piece, its bytes from, payload bytes from, and block bytes, of every block not skipped."""
        for obj, blocks in enumerate(ids):
            at = obj * self.object_bytes
            for piece, (owner, (size, gap, offset)) in enumerate(zip(self.owners, self.shapes, strict=True)):
                for block in blocks[owner]:
                    if block != SKIP:
                        yield piece, offset + int(block) * (size + gap), at, size
                    at += size

    def payloads(self, ids):
        out = np.zeros(len(ids) * self.object_bytes, dtype=np.uint8)
        for piece, start, at, size in self.walk(ids):
            out[at : at + size] = self.before[piece][start : start + size]
        return out

    def written(self, ids, source):
        after = [memory.copy() for memory in self.before]
        for piece, start, at, size in self.walk(ids):
            after[piece][start : start + size] = source[at : at + size]
        return after

    def check(self, after):
        for tensor, memory in zip(self.tensors, after, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), memory)


BYTES = st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 9))
WORDS = st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)).map(lambda s: [8 * n for n in s])


@st.composite
def cases(draw):
    """Return a case and ids of its objects, each block once in a member."""
    k, num_objects = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    pieces = st.lists(draw(st.sampled_from([BYTES, WORDS])), min_size=1, max_size=3)
    members = draw(st.lists(pieces, min_size=1, max_size=3))
    num_blocks = k * num_objects + draw(st.integers(1, 4))
    case = Case(members, k, num_blocks, seed=draw(st.integers(0, 99)))
    ids = [draw(st.permutations(range(1, num_blocks)))[: k * num_objects] for _ in members]
    columns = np.array(ids, dtype=np.int64).reshape(len(members), num_objects, k)
    return case, np.moveaxis(columns, 0, 1)


@given(case_ids=cases())
def test_gather_agrees_with_a_copy_block_by_block(case_ids):
    case, ids = case_ids
    target = np.full(len(ids) * case.object_bytes + 3, 7, dtype=np.uint8)
    case.io.gather(0, ids, target)
    np.testing.assert_array_equal(target[:-3], case.payloads(ids))
    assert target[-3:].tolist() == [7, 7, 7]
    case.check(case.before)


@given(case_ids=cases(), data=st.data())
def test_scatter_agrees_with_a_copy_block_by_block(case_ids, data):
    case, ids = case_ids
    skips = st.lists(st.booleans(), min_size=ids.size, max_size=ids.size)
    ids = np.where(np.array(data.draw(skips), dtype=bool).reshape(ids.shape), SKIP, ids)
    source = np.random.default_rng(1).integers(0, 256, len(ids) * case.object_bytes, dtype=np.uint8)
    case.io.scatter(0, ids, source.tobytes())
    case.check(case.written(ids, source))


MEMBERS = [[(32, 0, 0), (16, 16, 8)], [(24, 8, 16)]]
IDS = np.array([[[1, 2], [4, 6]], [[5, 3], [2, 1]], [[7, 6], [3, 5]]])
SOME = np.where(IDS == 5, SKIP, IDS)


def source_of(case, ids=IDS):
    return np.random.default_rng(2).integers(0, 256, len(ids) * case.object_bytes, dtype=np.uint8)


def test_unaligned_host_memory_is_taken():
    case = Case(MEMBERS, 2, 8)
    target = np.zeros(3 * case.object_bytes + 9, dtype=np.uint8)
    case.io.gather(0, IDS, target[1:])
    np.testing.assert_array_equal(target[1:-8], case.payloads(IDS))


def test_an_object_that_is_skipped_wholly_writes_nothing():
    case = Case(MEMBERS, 2, 8)
    case.io.scatter(0, np.full_like(IDS, SKIP), source_of(case))
    case.check(case.before)


def test_started_copies_on_the_cpu_are_done():
    case = Case(MEMBERS, 2, 8)
    source, target = source_of(case), np.zeros(3 * case.object_bytes, dtype=np.uint8)
    out = case.io.start_gather(0, IDS, target)
    assert out.done()
    np.testing.assert_array_equal(target, case.payloads(IDS))
    back = case.io.start_scatter(0, SOME, source)
    assert back.done()
    back.wait()
    case.check(case.written(SOME, source))


def test_tensors_made_in_inference_mode_or_with_gradients_are_written():
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            memory = torch.zeros(
                6, 4, dtype=torch.bfloat16, requires_grad=not torch.is_inference_mode_enabled()
            )
        piece = BlockPiece(memory=memory, block_bytes=8, stride_bytes=8, offset_bytes=0, num_blocks=6)
        io = TorchBlockIO(layout_of([8], 1), [[piece]])
        io.scatter(0, np.array([[[2]]]), torch.ones(4, dtype=torch.bfloat16).view(torch.uint8).numpy())
        assert memory.float().tolist() == [[0.0] * 4] * 2 + [[1.0] * 4] + [[0.0] * 4] * 3


def test_offsets_count_from_the_first_element_of_a_view():
    whole = torch.arange(64, dtype=torch.uint8)
    piece = BlockPiece(memory=whole[16:], block_bytes=4, stride_bytes=8, offset_bytes=4, num_blocks=5)
    target = bytearray(4)
    TorchBlockIO(layout_of([4], 1), [[piece]]).gather(0, np.array([[[2]]]), target)
    assert list(target) == [36, 37, 38, 39]


def test_what_does_not_fit_is_refused_before_a_byte_moves():
    case = Case(MEMBERS, 2, 8)
    source, target = source_of(case), np.zeros(3 * case.object_bytes, dtype=np.uint8)
    for ids in (np.where(IDS == 5, 0, IDS), np.where(IDS == 5, 8, IDS), IDS[:, :1], IDS.astype(np.int32)):
        with pytest.raises(TransferError, match="block"):
            case.io.start_gather(0, ids, target)
        with pytest.raises(TransferError, match="block"):
            case.io.start_scatter(0, ids, source)
    with pytest.raises(TransferError, match="SKIP"):
        case.io.start_gather(0, SOME, target)
    with pytest.raises(TransferError, match="written twice"):
        case.io.start_scatter(0, np.where(IDS == 5, 3, IDS), source)
    with pytest.raises(TransferError, match="target has"):
        case.io.start_gather(0, IDS, target[1:])
    with pytest.raises(TransferError, match="read-only"):
        case.io.start_gather(0, IDS, source.tobytes())
    with pytest.raises(TransferError, match="source has"):
        case.io.start_scatter(0, IDS, source[1:])
    with pytest.raises(TransferError, match="spec group is 1"):
        case.io.start_gather(1, IDS, target)
    with pytest.raises(TransferError, match="spec group is 1"):
        case.io.start_scatter(1, IDS, source)
    assert not target.any()
    case.check(case.before)


def piece_of(memory, num_blocks=6):
    return BlockPiece(memory=memory, block_bytes=4, stride_bytes=8, offset_bytes=0, num_blocks=num_blocks)


def test_memory_that_is_not_a_fitting_tensor_is_refused():
    for memory, message in (
        (torch.zeros(43, dtype=torch.uint8), "has 43 bytes; 44 are needed"),
        (torch.zeros(8, 8, dtype=torch.uint8).T, "a Tensor, is no contiguous tensor"),
        (np.zeros(99, dtype=np.uint8), "a ndarray, is no contiguous tensor"),
        (torch.zeros(99, dtype=torch.uint8, device="meta"), "pieces lie on .'meta'."),
    ):
        with pytest.raises(TransferError, match=message):
            TorchBlockIO(layout_of([4], 1), [[piece_of(memory)]])
    TorchBlockIO(layout_of([4], 1), [[piece_of(torch.zeros(44, dtype=torch.uint8))]])
    mixed = [[piece_of(torch.zeros(44, dtype=torch.uint8, device=device))] for device in ("cpu", "meta")]
    with pytest.raises(TransferError, match=r"pieces lie on \['cpu', 'meta'\]"):
        TorchBlockIO(layout_of([4, 4], 1), mixed)


def test_blocks_move_as_the_widest_words_that_fit():
    rows = torch.zeros(4, 16, dtype=torch.uint8)
    for start, size, dtype in (
        (0, 16, torch.int64),
        (8, 8, torch.int64),
        (4, 8, torch.int32),
        (2, 8, torch.int16),
        (1, 8, torch.uint8),
        (0, 4, torch.int32),
    ):
        words = torch_block_io._as_words(rows, rows[:, start : start + size])
        assert {tensor.dtype for tensor in words} == {dtype}


def test_words_lie_on_their_boundaries_in_memory_and_storage():
    rows = torch.zeros(4, 16, dtype=torch.uint8)
    memory = np.zeros(128, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 8 :]
    for start, offset, dtype in ((0, 0, torch.int64), (1, 0, torch.uint8), (4, 4, torch.int32)):
        staged = torch.from_numpy(memory[start:])[offset : offset + 64].view(4, 16)
        assert torch_block_io._as_words(rows, staged)[1].dtype == dtype
        assert torch_block_io._as_words(staged, rows)[0].dtype == dtype


class PretendCuda:
    """Runs the CUDA path on the CPU and writes down what was enqueued on which stream."""

    def __init__(self, monkeypatch):
        self.log = []
        self.streams = iter(("out", "in"))
        self.current = "caller"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.stream("compute"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: self.stream(next(self.streams)))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self.event())
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        for name in ("_collect", "_spread"):
            monkeypatch.setattr(torch_block_io, name, self.noted(getattr(torch_block_io, name), name))

    def noted(self, call, name):
        def run(*args):
            self.log.append(f"{self.current}:{name}")
            return call(*args)

        return run

    @contextmanager
    def entered(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def event(self):
        pretend = self

        class Event:
            failure = None
            is_over = False

            def record(self):
                pretend.log.append(f"{pretend.current}:record")

            def query(self):
                if self.failure:
                    raise self.failure
                return self.is_over

            def synchronize(self):
                self.is_over = self.query() or True

        return Event()

    def stream(self, name):
        pretend = self

        class Stream:
            def __init__(self):
                self.name = name

            def record_event(self):
                pretend.log.append(f"{name}:record")
                return "before"

            def wait_event(self, event):
                pretend.log.append(f"{name}:wait {event}")

            def synchronize(self):
                pretend.log.append(f"{name}:synchronize")

        return Stream()


@pytest.fixture
def pretend(monkeypatch):
    return PretendCuda(monkeypatch)


def on_pretend_cuda(compute_stream=None):
    case = Case(MEMBERS, 2, 8)
    case.io._cuda = torch_block_io._CudaCopies(torch.device("cpu"), compute_stream)
    return case


def test_a_gather_on_cuda_comes_after_the_compute_stream(pretend):
    case = on_pretend_cuda()
    target = np.zeros(3 * case.object_bytes, dtype=np.uint8)
    copy = case.io.start_gather(0, IDS, target)
    assert pretend.log == ["compute:record", "out:wait before", "out:_collect", "out:record"]
    np.testing.assert_array_equal(target, case.payloads(IDS))
    assert copy.done() is False
    copy.wait()
    assert copy.done() is True


@pytest.mark.parametrize("ids", [IDS, SOME])
def test_a_scatter_on_cuda_writes_after_the_compute_stream(pretend, ids):
    case = on_pretend_cuda()
    source = source_of(case)
    copy = case.io.start_scatter(0, ids, source.tobytes())
    assert pretend.log == ["compute:record", "in:wait before", "in:_spread", "in:record"]
    assert not copy.done()
    case.check(case.written(ids, source))


def test_a_given_compute_stream_is_used(pretend):
    case = on_pretend_cuda(pretend.stream("engine"))
    case.io.gather(0, IDS, bytearray(3 * case.object_bytes))
    assert pretend.log[0] == "engine:record"


def test_no_object_starts_nothing_on_cuda(pretend):
    case = on_pretend_cuda()
    assert case.io.start_gather(0, IDS[:0], bytearray()).done()
    assert case.io.start_scatter(0, IDS[:0], b"").done()
    assert pretend.log == []


@pytest.mark.usefixtures("pretend")
def test_failures_of_the_device_are_transfer_errors():
    case = on_pretend_cuda()
    copy = case.io.start_gather(0, IDS, bytearray(3 * case.object_bytes))
    copy._end.failure = torch.OutOfMemoryError("CUDA error")
    for call in (copy.done, copy.wait):
        with pytest.raises(TransferError, match="torch: CUDA error"):
            call()


def test_a_start_that_fails_leaves_nothing_under_way(pretend, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    case = on_pretend_cuda()
    for name in ("_collect", "_spread"):
        monkeypatch.setattr(torch_block_io, name, fail)
    with pytest.raises(TransferError, match="torch: CUDA out of memory"):
        case.io.start_gather(0, IDS, bytearray(3 * case.object_bytes))
    assert pretend.log[-1] == "out:synchronize"
    with pytest.raises(TransferError, match="torch: CUDA out of memory"):
        case.io.start_scatter(0, IDS, source_of(case))
    assert pretend.log[-1] == "in:synchronize"


def test_host_memory_that_is_not_pinned_is_refused_on_cuda(pretend, monkeypatch):
    case = on_pretend_cuda()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    with pytest.raises(TransferError, match="'m0 x2': host memory is not pinned"):
        case.io.start_gather(0, IDS, bytearray(3 * case.object_bytes))
    with pytest.raises(TransferError, match="host memory is not pinned"):
        case.io.start_scatter(0, IDS, source_of(case))
    assert pretend.log == []
    case.check(case.before)


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [8, 1])
def test_bytes_on_a_cuda_device_make_the_round_trip(unit):
    members = [[(3 * unit, unit, 0), (5 * unit, 0, 2 * unit)], [(7 * unit, 2 * unit, unit)]]
    case = Case(members, 2, 8, device="cuda")
    target = pinned_bytes(3 * case.object_bytes)
    case.io.gather(0, IDS, target)
    np.testing.assert_array_equal(target, case.payloads(IDS))
    target[:] = source_of(case)
    for ids in (IDS, SOME):
        case.io.scatter(0, ids, target)
    case.check(case.written(IDS, target))


@pytest.mark.gpu
def test_skipped_blocks_on_a_cuda_device_keep_their_bytes():
    case = Case(MEMBERS, 2, 8, device="cuda")
    source = pinned_bytes(3 * case.object_bytes)
    source[:] = source_of(case)
    case.io.scatter(0, SOME, source)
    case.check(case.written(SOME, source))


@pytest.mark.gpu
def test_copies_wait_for_a_busy_compute_stream():
    case = Case(MEMBERS, 2, 8, device="cuda")
    host, source = pinned_bytes(3 * case.object_bytes), pinned_bytes(3 * case.object_bytes)
    source[:] = source_of(case)
    case.io.gather(0, IDS, host)  # loads kernels and allocates, which may wait for the device
    case.io.scatter(0, IDS, host)
    case.tensors[0].clone().fill_(7)
    torch.cuda._sleep(200_000_000)
    for tensor in case.tensors:
        tensor.fill_(7)
    out = case.io.start_gather(0, IDS, host)
    assert not out.done()
    torch.cuda._sleep(200_000_000)
    seen = [tensor.clone() for tensor in case.tensors]
    back = case.io.start_scatter(0, IDS, source)
    assert not back.done()
    out.wait()
    back.wait()
    assert (host == 7).all()
    assert all((tensor == 7).all().item() for tensor in seen)
    case.before = [np.full_like(memory, 7) for memory in case.before]
    case.check(case.written(IDS, source))


@pytest.mark.gpu
def test_pageable_memory_and_a_second_device_are_refused():
    case = Case(MEMBERS, 2, 8, device="cuda")
    with pytest.raises(TransferError, match="not pinned"):
        case.io.gather(0, IDS, bytearray(3 * case.object_bytes))
    case.pieces[1] = [
        BlockPiece(
            memory=piece.memory.cpu(),
            block_bytes=piece.block_bytes,
            stride_bytes=piece.stride_bytes,
            offset_bytes=piece.offset_bytes,
            num_blocks=piece.num_blocks,
        )
        for piece in case.pieces[1]
    ]
    with pytest.raises(TransferError, match="pieces lie on"):
        TorchBlockIO(case.layout, case.pieces)
