import gc
import mmap
import random
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import StoreError
from hybridkv.stores.regions import RegionTable


def anonymous_map() -> mmap.mmap:
    return mmap.mmap(-1, mmap.PAGESIZE)


def read(table, segments):
    (pieces,) = table.resolve([segments])
    return pieces.gather()


def write(table, segments, data):
    (pieces,) = table.resolve([segments])
    pieces.scatter(data)


BUFFERS = {
    "bytearray": lambda: bytearray(64),
    "mmap": anonymous_map,
    "numpy": lambda: np.zeros(64, dtype=np.uint8),
    "numpy of floats in two dimensions": lambda: np.zeros((4, 4), dtype=np.float16),
    "numpy record": lambda: np.zeros(4, dtype=[("a", "<u4"), ("b", "<f8")]),
    "memoryview": lambda: memoryview(bytearray(64))[8:],
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())
def test_bytes_travel_through_any_writable_buffer(make):
    table, buffer = RegionTable(), make()
    region = table.register(buffer)
    assert region.num_bytes == memoryview(buffer).nbytes
    assert region.owner is buffer
    segments = [(region.address + 5, 3), (region.address, 2)]
    write(table, segments, b"abcde")
    assert read(table, segments) == b"abcde"
    assert memoryview(buffer).tobytes()[:8] == b"de\0\0\0abc"


def test_memory_that_holds_python_objects_is_refused():
    with pytest.raises(StoreError, match="Python objects"):
        RegionTable().register(np.array([None, "text"], dtype=object))


@pytest.mark.parametrize(
    "segments", [None, 7, [(1.5, 4)], [(0,)], [None], [("a", 1)], [(np.int64(2**62), np.int64(2**63 - 1))]]
)
def test_segments_that_are_no_pairs_of_integers_inside_a_region_are_refused(segments):
    table = RegionTable()
    region = table.register(bytearray(8))
    with pytest.raises(StoreError):
        table.resolve([segments])
    assert read(table, [(np.int64(region.address), np.uint8(8))]) == bytes(8)


def test_data_of_another_size_is_refused_before_a_byte_moves():
    table = RegionTable()
    region = table.register(buffer := bytearray(8))
    segments = [(region.address, 4)]
    for wrong in [b"", b"abc", b"abcde"]:
        with pytest.raises(StoreError, match="of 4 bytes"):
            write(table, segments, wrong)
    assert buffer == bytes(8)


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        (bytes(8), "read-only"),
        (memoryview(bytes(8)), "read-only"),
        (np.zeros((4, 4))[:, 1:], "not C-contiguous"),
        (np.zeros((4, 4)).T, "not C-contiguous"),
        (bytearray(), "empty"),
        (np.zeros((0, 4)), "empty"),
        ("text", "exports no memory"),
        (np.zeros(2, dtype="datetime64[s]"), "exports no memory"),
    ],
)
def test_a_buffer_that_cannot_serve_is_refused_with_its_reason(buffer, reason):
    with pytest.raises(StoreError, match=reason):
        RegionTable().register(buffer)


@pytest.mark.parametrize("part", [slice(0, 8), slice(3, 5), slice(0, 3), slice(5, 8), slice(2, 6)])
def test_overlapping_regions_are_refused(part):
    memory = np.zeros(8, dtype=np.uint8)
    table = RegionTable()
    table.register(memory[2:6])
    with pytest.raises(StoreError, match="overlaps"):
        table.register(memory[part])


def test_neighbours_do_not_overlap_in_whatever_order_they_come():
    memory = np.arange(8, dtype=np.uint8)
    table = RegionTable()
    regions = [table.register(memory[start : start + 2]) for start in (4, 0, 6, 2)]
    assert read(table, [(region.address, 2) for region in regions]) == bytes([4, 5, 0, 1, 6, 7, 2, 3])


def test_segments_are_checked_to_the_byte():
    memory = np.zeros(16, dtype=np.uint8)
    table = RegionTable()
    region = table.register(memory[4:12])
    table.resolve([[(region.address, 8)], [(region.address + 7, 1)]])
    for bad in [(-1, 1), (-1, 2), (7, 2), (8, 1), (0, 9), (0, 0), (0, -1), (4, -2), (-5, 20)]:
        with pytest.raises(StoreError, match=r"does not lie inside|at least one"):
            table.resolve([[(region.address, 1)], [(region.address + bad[0], bad[1])]])


def test_nothing_is_inside_an_empty_table():
    with pytest.raises(StoreError, match="does not lie inside"):
        read(RegionTable(), [(0, 1)])


def test_a_segments_object_that_follows_itself_is_resolved_once():
    class Counted(list):
        def __iter__(self):
            visits.append(1)
            return super().__iter__()

    visits = []
    table = RegionTable()
    region = table.register(bytearray(8))
    once, other = Counted([(region.address, 8)]), [(region.address, 4)]
    resolved = table.resolve([once] * 1000 + [other, once])
    assert [pieces.num_bytes for pieces in resolved] == [8] * 1000 + [4, 8]
    assert len(visits) == 2


def test_a_registered_buffer_cannot_be_resized_until_unregistered():
    table, buffer, memory_map = RegionTable(), bytearray(8), anonymous_map()
    region, mapped = table.register(buffer), table.register(memory_map)
    with pytest.raises(BufferError):
        buffer.clear()
    with pytest.raises(BufferError):
        memory_map.close()
    table.unregister(region)
    table.unregister(mapped)
    buffer.clear()
    memory_map.close()


def test_a_region_keeps_its_buffer_alive_until_unregistered():
    table, memory = RegionTable(), np.zeros(8, dtype=np.uint8)
    alive = weakref.ref(memory)
    region = table.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    table.unregister(region)
    del region
    gc.collect()
    assert alive() is None


def test_a_region_is_unregistered_once_and_only_where_it_is_registered():
    table, other = RegionTable(), RegionTable()
    region = table.register(buffer := bytearray(8))
    with pytest.raises(StoreError, match="not registered"):
        other.unregister(region)
    table.unregister(region)
    with pytest.raises(StoreError, match="not registered"):
        table.unregister(region)
    again = table.register(buffer)
    assert read(table, [(again.address, 8)]) == bytes(8)


def test_a_cleared_table_has_no_regions():
    table = RegionTable()
    region = table.register(buffer := bytearray(8))
    table.clear()
    with pytest.raises(StoreError, match="does not lie inside"):
        read(table, [(region.address, 1)])
    table.register(buffer)


SIZES = st.sampled_from([4, 8, 12])


@given(
    size=SIZES,
    count=st.sampled_from([1, 5, 23, 24, 40]),
    shift=st.sampled_from([0, 0, 0, 3]),
    odd=st.sampled_from([0, 0, 0, 1]),
    data=st.data(),
)
def test_many_equal_segments_on_a_grid_are_copied_like_any_others(size, count, shift, odd, data):
    table, buffer = RegionTable(), bytearray(40 * 12 + 32)
    address = table.register(buffer).address
    rows = data.draw(st.permutations(range(40)))[:count]
    segments = [(address + shift + row * size, size) for row in rows]
    segments[-1] = (segments[-1][0], size + odd)
    payload = random.Random(0).randbytes(size * count + odd)
    if odd and count > 1:  # the longer one would overlap its neighbour
        segments[-1] = (address + 40 * 12 + 8, size + odd)
    write(table, segments, payload)
    expected = bytearray(len(buffer))
    start = 0
    for place, num_bytes in segments:
        expected[place - address : place - address + num_bytes] = payload[start : start + num_bytes]
        start += num_bytes
    assert buffer == expected
    (pieces,) = table.resolve([segments])
    target = bytearray(len(payload))
    pieces.gather_into(memoryview(target))
    assert bytes(target) == pieces.gather() == b"".join(pieces.views) == payload
    with pytest.raises(StoreError, match="bytes cannot be copied"):
        pieces.gather_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("count", [7, 24])
@pytest.mark.parametrize("wrong", [(-8, 8), (64 * 8, 8), (0, 0), (1.5, 8), (2**63, 8), (0,)])
def test_one_wrong_segment_among_many_is_refused(count, wrong):
    table = RegionTable()
    address = table.register(bytearray(64 * 8)).address
    segments = [(address + 8 * idx, 8) for idx in range(count)]
    bad = (address + wrong[0], wrong[1]) if len(wrong) == 2 else wrong
    with pytest.raises(StoreError):
        table.resolve([[*segments, bad]])
    with pytest.raises(StoreError):
        table.resolve([[bad] * (count + 1)])
