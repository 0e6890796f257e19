"""Examples of calls that no store carries out."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hybridkv.errors import StoreClosedError, StoreError
from hybridkv.stores.base import (
    MAX_KEY_CHARS,
    GetResult,
    ListsObjects,
    PutResult,
    ReportsStats,
    Segments,
    Store,
)
from hybridkv.testing.stores.workbench import FILL, StoreExamples, Workbench, payload


class RefusalTests(StoreExamples):
    """Bad keys, lists, segments and buffers, and a closed store, are errors before a byte moves."""

    def test_an_illegal_key_refuses_the_whole_call(self) -> None:
        """Empty, too long, not ASCII, a space, a control character."""
        with self.workbench() as bench:
            source = bench.source(payload(0, self.object_bytes))
            for key in ["", "x" * (MAX_KEY_CHARS + 1), "schlüssel", "a b", "a\n", "a\x7f"]:
                for call in _batch_calls(bench.store, ["good", key], [source, source]):
                    with pytest.raises(StoreError):
                        call()
            assert not bench.contains("good")

    def test_what_is_no_key_or_no_segments_refuses_the_call(self) -> None:
        """A key is a text; segments are pairs of integers."""
        with self.workbench() as bench:
            source = bench.source(payload(0, self.object_bytes))
            for key in [None, 1, b"x"]:
                for call in _batch_calls(bench.store, [key], [source]):  # type: ignore[list-item]
                    with pytest.raises(StoreError):
                        call()
            for segments in [None, [None], [(bench.region.address,)], [(bench.region.address + 0.5, 1)]]:
                self._assert_refused(bench, segments)  # type: ignore[arg-type]

    def test_lists_of_unequal_length_refuse_the_call(self) -> None:
        """Sources, targets and hints have one entry for each key."""
        with self.workbench() as bench:
            source = bench.source(payload(0, self.object_bytes))
            for keys, sources in [(["a", "b"], [source]), (["a"], [source] * 2)]:
                with pytest.raises(StoreError):
                    bench.store.put(keys, sources)
                with pytest.raises(StoreError):
                    bench.store.get(keys, sources)
            with pytest.raises(StoreError):
                bench.store.put(["a"], [source], [])
            assert bench.store.contains(["a", "b"]) == [False, False]

    def test_an_object_without_bytes_refuses_the_call(self) -> None:
        """No segment, and segments without or with fewer than no bytes."""
        with self.workbench() as bench:
            address = bench.region.address
            for empty in [[], [(address, 0)], [(address, 4), (address + 4, 0)], [(address + 4, -4)]]:
                self._assert_refused(bench, empty)

    def test_a_segment_up_to_the_edges_of_its_region_is_accepted(self) -> None:
        """The first and the last byte belong to the region."""
        with self.workbench() as bench:
            whole = [(bench.region.address, bench.region.num_bytes)]
            first = [(bench.region.address, self.object_bytes)]
            last = [(bench.region.address + bench.region.num_bytes - self.object_bytes, self.object_bytes)]
            bench.write(whole, payload(0, bench.region.num_bytes))
            edges = bench.read(first), bench.read(last)
            assert bench.store.put(["a", "b"], [first, last]) == [PutResult.STORED] * 2
            assert bench.store.get(["a", "b"], [last, first]) == [GetResult.OK] * 2
            assert (bench.read(last), bench.read(first)) == edges

    def test_a_segment_outside_every_region_refuses_the_call(self) -> None:
        """One byte before, one byte after, and memory that nobody registered."""
        with self.workbench() as bench:
            start, stop = bench.region.address, bench.region.address + bench.region.num_bytes
            stranger = np.zeros(self.object_bytes, dtype=np.uint8)
            for outside in [(start - 1, 2), (stop - 1, 2), (stop, 1), (stranger.ctypes.data, 1), (8, 8)]:
                self._assert_refused(bench, [(start, 1), outside])

    def test_an_object_may_lie_in_two_regions_but_a_segment_may_not(self) -> None:
        """Two regions whose memory touches."""
        half = self.object_bytes
        memory = np.frombuffer(bytearray(payload(0, 2 * half)), dtype=np.uint8)
        with self.workbench() as bench:
            left, right = bench.store.register(memory[:half].data), bench.store.register(memory[half:].data)
            pieces = [(right.address, half), (left.address, half)]
            assert bench.store.put(["a"], [pieces]) == [PutResult.STORED]
            swapped = memory[half:].tobytes() + memory[:half].tobytes()
            assert bench.get("a", 2 * half) == (GetResult.OK, swapped)
            self._assert_refused(bench, [(right.address - 1, 2)])

    def _assert_refused(self, bench: Workbench, bad: Segments) -> None:
        """Check that ``bad`` in a batch refuses put and get before the other key is served."""
        bench.put("there", payload("there", self.object_bytes))
        good = bench.lay_out(self.object_bytes)
        with pytest.raises(StoreError):
            bench.store.put(["new", "bad"], [good, bad])
        with pytest.raises(StoreError):
            bench.store.get(["there", "bad"], [good, bad])
        assert bench.store.contains(["new", "bad"]) == [False, False]
        assert bench.read(good) == bytes([FILL]) * self.object_bytes

    def test_an_unusable_buffer_is_not_registered(self) -> None:
        """Read-only, not contiguous, empty, overlapping."""
        with self.workbench() as bench:
            strided, taken = np.zeros(16, dtype=np.uint8)[::2].data, bench.memory.data
            unusable: list[bytes | bytearray | memoryview]
            unusable = [bytes(8), strided, bytearray(), taken, taken[1:2], taken[-1:]]
            for buffer in unusable:
                with pytest.raises(StoreError):
                    bench.store.register(buffer)
            assert bench.put("a", payload(0, self.object_bytes)) is PutResult.STORED

    def test_a_region_is_unusable_after_unregister_and_its_buffer_may_come_back(self) -> None:
        """A region is unregistered once; objects put from it stay."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            buffer = bytearray(data)
            region = bench.store.register(buffer)
            segments = [(region.address, len(data))]
            bench.store.put(["a"], [segments])
            bench.store.unregister(region)
            self._assert_refused(bench, segments)
            with pytest.raises(StoreError):
                bench.store.unregister(region)
            assert bench.get("a", len(data)) == (GetResult.OK, data)
            again = bench.store.register(buffer)
            assert bench.store.get(["a"], [[(again.address, len(data))]]) == [GetResult.OK]

    def test_a_closed_store_refuses_everything_but_close(self) -> None:
        """All methods, also those of its capabilities."""
        with self.workbench() as bench:
            store, source = bench.store, bench.source(payload(0, self.object_bytes))
            bench.put("a", payload(0, self.object_bytes))
            store.close()
            store.close()
            calls: list[Callable[[], object]] = _batch_calls(store, ["a"], [source])
            calls += [lambda: store.register(bytearray(8)), lambda: store.unregister(bench.region)]
            if isinstance(store, ListsObjects):
                calls.append(store.list)
            if isinstance(store, ReportsStats):
                calls.append(store.stats)
            for call in calls:
                with pytest.raises(StoreClosedError):
                    call()


def _batch_calls(
    store: Store, keys: Sequence[str], segments: Sequence[Segments]
) -> list[Callable[[], object]]:
    return [
        lambda: store.contains(keys),
        lambda: store.put(keys, segments),
        lambda: store.get(keys, segments),
        lambda: store.discard(keys),
    ]
