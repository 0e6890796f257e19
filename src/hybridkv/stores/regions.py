"""Memory that a store may touch: registered regions, and copies that never leave them."""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import StoreError
from hybridkv.stores.base import Segments
from hybridkv.stores.batch import as_segments, once_per_run

if TYPE_CHECKING:
    from typing_extensions import Buffer

MIN_GRID_SEGMENTS = 24
"""Fewer segments cost less one by one than the calls that find out whether they lie on a grid."""
RELEASE_BYTES = 512 * 1024
"""Pieces of this size and more are copied without the GIL. For smaller ones, with one more busy thread in the
process, getting it back would cost far more than the copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """One registered piece of memory: the addresses [address, address + num_bytes).

    Attributes:
        address: of the first byte.
        num_bytes: > 0.
        owner: the object whose memory it is.
    """

    address: int
    num_bytes: int
    owner: "Buffer" = field(repr=False)


class Pieces:
    """One object's segments as views of registered memory, which they keep alive.

    Attributes:
        num_bytes: of all views together.
        views: writable, one for each segment, in the object's order.
    """

    __slots__ = ("num_bytes", "views")

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.num_bytes = sum(map(len, views))

    def gather(self) -> bytes:
        """Return a copy of the object's bytes."""
        return b"".join(self.views)

    def gather_into(self, target: memoryview) -> None:
        """Copy the object's bytes over ``target``, writable, ``num_bytes`` long and of format B.

        Raises:
            StoreError: the sizes differ; no byte was moved.
        """
        self._check_size(len(target))
        start = 0
        for view in self.views:
            stop = start + len(view)
            if stop - start < RELEASE_BYTES:
                target[start:stop] = view
            else:
                _copy_without_gil(target[start:stop], view)
            start = stop

    def scatter(self, data: bytes | bytearray | memoryview) -> None:
        """Copy ``data``, ``num_bytes`` long and of format B if it is a view, over the segments.

        Raises:
            StoreError: the sizes differ; no byte was moved.
        """
        self._check_size(len(data))
        source = memoryview(data)
        start = 0
        for view in self.views:
            stop = start + len(view)
            if stop - start < RELEASE_BYTES:
                view[:] = source[start:stop]
            else:
                _copy_without_gil(view, source[start:stop])
            start = stop

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes != self.num_bytes:
            raise StoreError(
                f"{num_bytes} bytes cannot be copied to or from segments of {self.num_bytes} bytes"
            )


def _copy_without_gil(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class GridPieces(Pieces):
    """One object's equal segments on a grid of their size in one region, as paged block memory has them.

    One call into C copies them all, where ``Pieces`` needs several for each.

    Args:
        grid: the region's bytes, (rows, bytes of a segment).
        rows: (n,), the segments in the object's order.
    """

    __slots__ = ("_grid", "_rows")

    def __init__(self, grid: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        self._grid, self._rows = grid, rows
        self.num_bytes = len(rows) * grid.shape[1]

    @property
    def views(self) -> list[memoryview]:  # type: ignore[override]
        """Writable, one for each segment, in the object's order."""
        return [self._grid[row].data for row in self._rows.tolist()]

    def gather(self) -> bytes:
        """Return a copy of the object's bytes."""
        return self._grid[self._rows].tobytes()

    def gather_into(self, target: memoryview) -> None:
        """Copy the object's bytes over ``target``; see ``Pieces``."""
        self._check_size(len(target))
        out = np.frombuffer(target, dtype=np.uint8).reshape(len(self._rows), -1)
        np.take(self._grid, self._rows, axis=0, out=out, mode="clip")  # clip: without a buffer between

    def scatter(self, data: bytes | bytearray | memoryview) -> None:
        """Copy ``data`` over the segments; see ``Pieces``."""
        self._check_size(len(data))
        self._grid[self._rows] = np.frombuffer(data, dtype=np.uint8).reshape(len(self._rows), -1)


class _Registered(NamedTuple):
    """What a look-up needs, in the order of addresses; replaced as a whole, so that readers need no lock."""

    starts: list[int]
    stops: list[int]
    views: list[memoryview]


class RegionTable:
    """The registered regions of one store. All methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[Region, memoryview] = {}
        self._registered = _Registered([], [], [])

    def register(self, buffer: "Buffer") -> Region:
        """Register a writable, C-contiguous buffer; it can be neither freed nor resized until ``unregister``.

        Raises:
            StoreError: the buffer is read-only, not contiguous, empty or overlaps a registered one.
        """
        memory = _memory(buffer)
        start: int = memory.ctypes.data
        stop = start + memory.nbytes
        region = Region(address=start, num_bytes=memory.nbytes, owner=buffer)
        with self._lock:
            starts, stops, _ = self._registered
            at = bisect_right(starts, start)
            if (at and stops[at - 1] > start) or (at < len(starts) and starts[at] < stop):
                raise StoreError(
                    f"buffer of {region.num_bytes} bytes overlaps a region; unregister that one first"
                )
            self._replace({**self._views, region: memory.data})
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region and let go of its memory; the buffer may be registered anew.

        Raises:
            StoreError: the region is not registered here.
        """
        with self._lock:
            if region not in self._views:
                raise StoreError(f"{region} is not registered; unregister each region once")
            self._replace({held: view for held, view in self._views.items() if held is not region})

    def clear(self) -> None:
        """Forget all regions."""
        with self._lock:
            self._replace({})

    def _replace(self, views: dict[Region, memoryview]) -> None:
        ordered = sorted(views.items(), key=lambda item: item[0].address)
        self._views = views
        self._registered = _Registered(
            [region.address for region, _ in ordered],
            [region.address + region.num_bytes for region, _ in ordered],
            [view for _, view in ordered],
        )

    def resolve(self, batch: Sequence[Segments]) -> list[Pieces]:
        """Return the views of each object of a batch; all are checked before this returns.

        A segments object that follows itself is resolved once and shares its ``Pieces``.

        Raises:
            StoreError: a segment does not lie inside one region or has no byte, or an object has no segment.
        """
        registered = self._registered
        return once_per_run(batch, partial(_pieces, registered))


def _memory(buffer: "Buffer") -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a buffer without copying."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise StoreError(f"{type(buffer).__name__} exports no memory: {error}") from error
    if view.readonly:
        raise StoreError(f"{type(buffer).__name__} is read-only; register memory that can be written")
    if not view.c_contiguous:
        raise StoreError(
            f"{type(buffer).__name__} is not C-contiguous; register the array that it is a part of"
        )
    if "O" in view.format:
        raise StoreError(f"{type(buffer).__name__} holds Python objects; register plain numbers")
    if not view.nbytes:
        raise StoreError(f"{type(buffer).__name__} is empty; a region has at least one byte")
    return np.frombuffer(view, dtype=np.uint8)


def _pieces(registered: _Registered, segments: Segments) -> Pieces:
    return _grid_pieces(registered, segments) or _single_pieces(registered, segments)


def _grid_pieces(registered: _Registered, segments: Segments) -> GridPieces | None:
    """Return many equal segments on one grid, or ``None`` where they are not that, or wrong."""
    try:
        if len(segments) < MIN_GRID_SEGMENTS or set(map(len, segments)) != {2}:
            return None
        numbers = np.frombuffer(array("q", list(chain.from_iterable(segments))), dtype=np.int64)
    except (TypeError, OverflowError):
        return None
    addresses, sizes = numbers[::2], numbers[1::2]
    size, lowest = int(sizes[0]), int(addresses.min())
    at = bisect_right(registered.starts, lowest) - 1
    if at < 0 or size < 1 or int(addresses.max()) + size > registered.stops[at] or (sizes != size).any():
        return None
    rows, rest = np.divmod(addresses - registered.starts[at], size)
    if rest.any():
        return None
    region = np.frombuffer(registered.views[at], dtype=np.uint8)
    return GridPieces(region[: len(region) // size * size].reshape(-1, size), rows)


def _single_pieces(registered: _Registered, segments: Segments) -> Pieces:
    starts, stops, regions = registered
    views = []
    region_start = region_stop = 0
    region = memoryview(b"")
    for address, num_bytes in as_segments(segments):
        if not region_start <= address <= region_stop - num_bytes:  # mostly it is the same region again
            at = bisect_right(starts, address) - 1
            if at < 0 or address + num_bytes > stops[at]:
                raise StoreError(
                    f"segment of {num_bytes} bytes at {address:#x} does not lie inside one registered region"
                )
            region_start, region_stop, region = starts[at], stops[at], regions[at]
        offset = address - region_start
        views.append(region[offset : offset + num_bytes])
    return Pieces(views)
