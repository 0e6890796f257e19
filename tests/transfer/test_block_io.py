import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import TransferError
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.transfer import block_io
from hybridkv.transfer.block_io import SKIP, BlockPiece, NumpyBlockIO


def layout_of(members, k, *, tp=1):
    """Members of one spec group (bytes a block on one rank), behind a window and a scratch group."""
    full = [
        CacheGroup(
            name=f"full{idx}",
            spec=Full(block_size=16),
            layer_block_bytes=size * tp,
            shards=tp,
            blocks_per_object=k,
        )
        for idx, size in enumerate(members)
    ]
    window = CacheGroup(
        name="window", spec=SlidingWindow(block_size=16, window=20), layer_block_bytes=3 * tp, shards=tp
    )
    scratch = CacheGroup(name="scratch", spec=Full(block_size=16), prefix_cacheable=False)
    return Layout(name="test", groups=(window, full[0], scratch, *full[1:]), tp=tp)


FULL = 1
"""Index of the spec group that ``layout_of`` is about."""


class Case:
    """A spec group with its memory, as plain Python bytes that the oracle copies one by one."""

    def __init__(self, members, k, objects, seed=0, *, tp=1):
        rng = np.random.default_rng(seed)
        self.members = [
            [BlockPiece(memory=bytearray(rng.bytes(size)), **shape) for size, shape in pieces]
            for pieces in members
        ]
        self.k = k
        self.objects = objects
        sizes = [sum(piece.block_bytes for piece in pieces) for pieces in self.members]
        self.object_bytes = sum(sizes) * k
        window = [
            BlockPiece(memory=bytearray(12), block_bytes=3, stride_bytes=3, offset_bytes=0, num_blocks=4)
        ]
        first, *rest = self.members
        self.io = NumpyBlockIO(layout_of(sizes, k, tp=tp), [window, first, [], *rest])

    def places(self, obj):
        """Yield memory and index of each payload byte of an object, ``None`` where it is skipped."""
        for member, pieces in enumerate(self.members):
            for piece in pieces:
                for block in self.objects[obj][member]:
                    for byte in range(piece.block_bytes):
                        at = piece.offset_bytes + block * piece.stride_bytes + byte
                        yield None if block == SKIP else (piece.memory, at)

    def ids(self):
        shape = (len(self.objects), len(self.members), self.k)
        return np.array(self.objects, dtype=np.int64).reshape(shape)

    def memories(self):
        return [bytes(piece.memory) for pieces in self.members for piece in pieces]


@st.composite
def cases(draw, *, may_skip):
    k, num_objects = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    members, columns = [], []
    for _ in range(draw(st.integers(1, 3))):
        num_blocks = k * num_objects + draw(st.integers(1, 4))
        pieces = []
        for _ in range(draw(st.integers(1, 3))):
            block, gap, offset = draw(st.tuples(st.integers(1, 7), st.integers(0, 5), st.integers(0, 9)))
            size = offset + (num_blocks - 1) * (block + gap) + block + draw(st.integers(0, 3))
            shape = {"block_bytes": block, "stride_bytes": block + gap, "offset_bytes": offset}
            pieces.append((size, {**shape, "num_blocks": num_blocks}))
        members.append(pieces)
        ids = draw(st.permutations(range(1, num_blocks)))[: k * num_objects]
        if may_skip:
            ids = [SKIP if draw(st.booleans()) else block for block in ids]
        columns.append(np.array(ids, dtype=np.int64).reshape(num_objects, k))
    return Case(members, k, np.stack(columns, axis=1).tolist(), draw(st.integers(0, 99)))


@given(case=cases(may_skip=False), chunk=st.sampled_from([1, 16, 1 << 18]))
def test_gather_agrees_with_a_copy_byte_by_byte(case, chunk):
    before, count = case.memories(), len(case.objects)
    expected = bytes(memory[at] for obj in range(count) for memory, at in case.places(obj))
    target = bytearray(b"\xaa" * (count * case.object_bytes + 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_io, "CHUNK_BYTES", chunk)
        case.io.gather(FULL, case.ids(), target)
    assert target == expected + b"\xaa" * 5
    assert case.memories() == before


@given(case=cases(may_skip=True), chunk=st.sampled_from([1, 16, 1 << 18]), seed=st.integers(0, 99))
def test_scatter_agrees_with_a_copy_byte_by_byte(case, chunk, seed):
    count = len(case.objects)
    source = np.random.default_rng(seed).bytes(count * case.object_bytes + 5)
    expected = {id(piece.memory): bytearray(piece.memory) for pieces in case.members for piece in pieces}
    payload = iter(source)
    for obj in range(count):
        for place in case.places(obj):
            byte = next(payload)
            if place is not None:
                expected[id(place[0])][place[1]] = byte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_io, "CHUNK_BYTES", chunk)
        case.io.scatter(FULL, case.ids(), source)
    assert case.memories() == [bytes(memory) for memory in expected.values()]


def shape(block, stride, offset=0, num_blocks=6):
    return {"block_bytes": block, "stride_bytes": stride, "offset_bytes": offset, "num_blocks": num_blocks}


def small(*, tp=1):
    """Two members, k = 2, two objects."""
    members = [[(100, shape(4, 6, 3)), (100, shape(2, 2))], [(100, shape(5, 9, 0, num_blocks=9))]]
    return Case(members, 2, [[[1, 2], [8, 3]], [[5, 4], [6, 7]]], tp=tp)


def test_the_payload_is_members_then_pieces_then_blocks():
    case = small()
    target = bytearray(2 * case.object_bytes)
    case.io.gather(FULL, case.ids(), target)
    (a_key, a_value), (b_all,) = ([piece.memory for piece in pieces] for pieces in case.members)
    first = a_key[9:13] + a_key[15:19] + a_value[2:4] + a_value[4:6] + b_all[72:77] + b_all[27:32]
    assert target[: case.object_bytes] == first


def test_sizes_are_those_of_one_rank():
    case = small(tp=2)
    target = bytearray(2 * case.object_bytes)
    case.io.gather(FULL, case.ids(), target)
    assert target == bytes(memory[at] for obj in (0, 1) for memory, at in case.places(obj))


def test_members_may_lie_over_each_other_in_one_memory():
    memory = np.arange(60, dtype=np.uint8)
    piece = BlockPiece(memory=memory, **shape(10, 10))
    window = BlockPiece(memory=memory, **shape(3, 10))
    io = NumpyBlockIO(layout_of([10, 10], 1), [[window], [piece], [], [piece]])
    target = np.zeros(20, dtype=np.uint8)
    io.gather(FULL, np.array([[[2], [5]]]), target)
    assert target.tolist() == [*range(20, 30), *range(50, 60)]
    io.scatter(0, np.array([[[4]]]), b"\xff\xfe\xfd")
    assert memory[39:44].tolist() == [39, 255, 254, 253, 43]


def test_any_contiguous_dtype_is_taken_as_bytes():
    memory = np.arange(8, dtype="<i4")
    io = NumpyBlockIO(
        layout_of([4], 1),
        [[BlockPiece(memory=memory, **shape(3, 4))], [BlockPiece(memory=memory, **shape(4, 4))], []],
    )
    target = np.zeros(2, dtype="<i4")
    io.gather(FULL, np.array([[[5]]]), target)
    assert target.tolist() == [5, 0]
    io.scatter(FULL, np.array([[[2]]]), np.array([-1], dtype="<i4"))
    assert memory.tolist() == [0, 1, -1, 3, 4, 5, 6, 7]


def test_ids_may_be_read_only_and_no_object_is_no_work():
    case = small()
    ids = np.frombuffer(case.ids().tobytes(), dtype="<i8").reshape(2, 2, 2)
    target = bytearray(2 * case.object_bytes)
    case.io.gather(FULL, ids, target)
    assert any(target)
    case.io.gather(FULL, ids[:0], bytearray())
    case.io.scatter(FULL, ids[:0], b"")


def changed(obj, member, at, block):
    ids = small().ids()
    ids[obj, member, at] = block
    return ids


WRONG_IDS = [
    (changed(1, 0, 1, 0), "object 1, member 0: block 1 is the null block"),
    (changed(0, 1, 0, -2), "object 0, member 1: block 0 is -2; give ids from 1 to 8"),
    (changed(1, 0, 0, 6), "object 1, member 0: block 0 is 6; give ids from 1 to 5"),
    (changed(1, 1, 0, 9), "block 0 is 9; give ids from 1 to 8"),
    (changed(0, 0, 0, np.iinfo(np.int64).min), "give ids from 1 to 5"),
    (small().ids().astype(np.int32), "block ids are int32; give an int64 array"),
    (small().ids().astype(">i8"), "block ids are >i8; give an int64 array"),
    (small().ids().tolist(), "block ids are list; give an int64 array"),
    (small().ids()[0], re.escape("have shape (2, 2); give (objects, members, k) = (objects, 2, 2)")),
    (small().ids()[:, :1], re.escape("have shape (2, 1, 2)")),
    (small().ids()[:, :, :1], re.escape("have shape (2, 2, 1)")),
    (small().ids()[..., None], re.escape("have shape (2, 2, 2, 1)")),
]


@pytest.mark.parametrize(("ids", "message"), WRONG_IDS)
def test_wrong_ids_are_refused_before_a_byte_moves(ids, message):
    case = small()
    before, target = case.memories(), bytearray(2 * case.object_bytes)
    with pytest.raises(TransferError, match=message):
        case.io.gather(FULL, ids, target)
    with pytest.raises(TransferError, match=message):
        case.io.scatter(FULL, ids, b"\xff" * 2 * case.object_bytes)
    assert not any(target)
    assert case.memories() == before


def test_gather_refuses_skip():
    case = small()
    target = bytearray(2 * case.object_bytes)
    with pytest.raises(TransferError, match="object 1, member 1: block 1 is SKIP"):
        case.io.gather(FULL, changed(1, 1, 1, SKIP), target)
    assert not any(target)


def test_scatter_refuses_a_block_twice_in_a_member():
    case = small()
    before = case.memories()
    with pytest.raises(TransferError, match="block 8 of member 1 is written twice"):
        case.io.scatter(FULL, changed(1, 1, 1, 8), bytes(2 * case.object_bytes))
    assert case.memories() == before
    case.io.gather(FULL, changed(1, 1, 1, 8), bytearray(2 * case.object_bytes))


@pytest.mark.parametrize("spec_group", [-1, 2])
def test_an_unknown_spec_group_is_refused(spec_group):
    case = small()
    with pytest.raises(TransferError, match=f"spec group is {spec_group}; the layout has 0 to 1"):
        case.io.gather(spec_group, case.ids(), bytearray(999))
    with pytest.raises(TransferError, match=f"spec group is {spec_group}; the layout has 0 to 1"):
        case.io.scatter(spec_group, case.ids(), bytes(999))


SIZE = 2 * small().object_bytes
WRONG_TARGETS = [
    (bytearray(SIZE - 1), f"the target has {SIZE - 1} bytes; {SIZE} are needed"),
    (bytes(SIZE), "the target is read-only"),
    (np.zeros(2 * SIZE, dtype=np.uint8)[::2], "the target is not C-contiguous"),
    (np.zeros((SIZE, 2), dtype=np.uint8, order="F"), "the target is not C-contiguous"),
    (np.full(SIZE, None), "holds Python objects"),
    (7, "the target: int exports no memory"),
]


@pytest.mark.parametrize(("target", "message"), WRONG_TARGETS)
def test_wrong_targets_are_refused(target, message):
    case = small()
    with pytest.raises(TransferError, match=message):
        case.io.gather(FULL, case.ids(), target)


def test_wrong_sources_are_refused_before_a_byte_moves():
    case = small()
    before = case.memories()
    for source, message in (
        (b"\xff" * (SIZE - 1), f"the source has {SIZE - 1} bytes; {SIZE} are needed"),
        (np.ones(2 * SIZE, dtype=np.uint8)[::2], "the source is not C-contiguous"),
        ("text", "the source: str exports no memory"),
    ):
        with pytest.raises(TransferError, match=message):
            case.io.scatter(FULL, case.ids(), source)
    assert case.memories() == before


@pytest.mark.parametrize("field", ["block_bytes", "stride_bytes", "num_blocks", "offset_bytes"])
def test_a_piece_with_a_wrong_number_is_refused(field):
    least = 0 if field == "offset_bytes" else 1
    for value in (least - 1, 1.0, True, None):
        with pytest.raises(TransferError, match=f"{field} is {value!r}; give an integer >= {least}"):
            BlockPiece(memory=bytearray(99), **{**shape(4, 4), field: value})


def test_the_blocks_of_a_piece_may_not_overlap():
    with pytest.raises(TransferError, match="stride_bytes 3 is below block_bytes 4"):
        BlockPiece(memory=bytearray(99), **shape(4, 3))


def io_of(*pieces, members=(4,)):
    window = BlockPiece(memory=bytearray(18), **shape(3, 3))
    return NumpyBlockIO(layout_of(members, 1), [[window], *pieces])


def test_pieces_that_are_not_the_layouts_are_refused():
    fits = BlockPiece(memory=bytearray(24), **shape(4, 4))
    io_of([fits], [])
    with pytest.raises(TransferError, match="pieces of 2 cache groups; give those of all 3"):
        io_of([fits])
    with pytest.raises(
        TransferError, match="'full0': its pieces hold 8 bytes a block; the layout says 4 over 1"
    ):
        io_of([fits, fits], [])
    with pytest.raises(TransferError, match="'full0': its pieces hold 0 bytes a block"):
        io_of([], [])
    short = BlockPiece(memory=bytearray(24), **shape(4, 4, num_blocks=5))
    with pytest.raises(TransferError, match=re.escape("'full0': its pieces hold [5, 6] blocks")):
        io_of([fits, short], [], members=(8,))
    other = BlockPiece(memory=bytearray(36), **shape(6, 6))
    with pytest.raises(TransferError, match="'full0': its pieces hold 6 bytes a block; the layout says 4"):
        io_of([other], [], [fits], members=(4, 6))


def test_the_layers_of_a_cache_group_count():
    group = CacheGroup(name="full", spec=Full(block_size=16), layers=3, layer_block_bytes=5)
    pieces = [BlockPiece(memory=bytearray(90), **shape(size, size)) for size in (4, 10, 1)]
    layout = Layout(name="test", groups=(group,))
    NumpyBlockIO(layout, [pieces])
    with pytest.raises(TransferError, match="its pieces hold 5 bytes a block; the layout says 15 over 1"):
        NumpyBlockIO(layout, [pieces[::2]])


def test_pieces_that_leave_their_memory_or_cannot_be_written_are_refused():
    for memory, message in (
        (bytearray(36), "the memory of a piece has 36 bytes; 37 are needed"),
        (bytes(99), "the memory of a piece is read-only"),
        (np.zeros((40, 2), dtype=np.uint8)[:, 0], "the memory of a piece is not C-contiguous"),
    ):
        with pytest.raises(TransferError, match=message):
            io_of([BlockPiece(memory=memory, **shape(4, 6, 3))], [])
    io_of([BlockPiece(memory=bytearray(37), **shape(4, 6, 3))], [])
