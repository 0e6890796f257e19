"""Memory that a store may touch: registered regions, and copies that never leave them."""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import StoreError
from hybridkv.stores.base import Segments
from hybridkv.stores.batch import as_segments, once_per_run

if TYPE_CHECKING:
    from typing_extensions import Buffer

Numbers = NDArray[np.int64]
Grid = NDArray[np.void]

MIN_GRID_SEGMENTS = 8
"""Fewer segments cost less one by one than the calls into numpy that copy them all."""
LARGE_SEGMENT_BYTES = 32 * 1024
"""Such segments cost less one by one than the second copy that a grid needs to keep the GIL."""
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

    Args:
        views: writable, one for each segment, in the object's order.
        num_bytes: of all views together.
    """

    __slots__ = ("num_bytes", "views")

    def __init__(self, views: list[memoryview], num_bytes: int) -> None:
        self.views = views
        self.num_bytes = num_bytes

    def gather(self) -> bytes:
        """Return a copy of the object's bytes."""
        return b"".join(self.views)

    def gather_into(self, target: memoryview) -> None:
        """Copy the object's bytes over ``target``, writable, ``num_bytes`` long and of format B.

        Raises:
            StoreError: the sizes differ; no byte was moved.
        """
        if len(target) != self.num_bytes:
            self._refuse_size(len(target))
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
        if len(data) != self.num_bytes:
            self._refuse_size(len(data))
        source = memoryview(data)
        start = 0
        for view in self.views:
            stop = start + len(view)
            if stop - start < RELEASE_BYTES:
                view[:] = source[start:stop]
            else:
                _copy_without_gil(view, source[start:stop])
            start = stop

    def _refuse_size(self, num_bytes: int) -> NoReturn:
        raise StoreError(f"{num_bytes} bytes cannot be copied to or from segments of {self.num_bytes} bytes")


def _copy_without_gil(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class GridPieces(Pieces):
    """One object's equal segments on a grid of their size in one region, as paged block memory has them.

    One call into C copies them all, where ``Pieces`` needs several for each.

    Args:
        grid: the region's bytes, one item of a segment's size for each row.
        rows: (n,), the segments in the object's order.
    """

    __slots__ = ("_grid", "_rows")

    def __init__(self, grid: Grid, rows: Numbers) -> None:
        self._grid, self._rows = grid, rows
        self.num_bytes = len(rows) * grid.itemsize

    @property
    def views(self) -> list[memoryview]:  # type: ignore[override]
        """Writable, one for each segment, in the object's order."""
        return [self._grid[row : row + 1].view(np.uint8).data for row in self._rows.tolist()]

    def gather(self) -> bytes:
        """Return a copy of the object's bytes."""
        return self._grid[self._rows].tobytes()

    def gather_into(self, target: memoryview) -> None:
        """Copy the object's bytes over ``target``; see ``Pieces``."""
        if len(target) != self.num_bytes:
            self._refuse_size(len(target))
        if self.num_bytes < RELEASE_BYTES:  # a second copy in the cache; `take` would give up the GIL
            target[:] = self._grid[self._rows].view(np.uint8).data
        else:
            out = np.frombuffer(target, dtype=self._grid.dtype)
            self._grid.take(self._rows, out=out, mode="clip")  # clip: without a buffer between

    def scatter(self, data: bytes | bytearray | memoryview) -> None:
        """Copy ``data`` over the segments; see ``Pieces``."""
        if len(data) != self.num_bytes:
            self._refuse_size(len(data))
        self._grid[self._rows] = np.frombuffer(data, dtype=self._grid.dtype)


class _Registered(NamedTuple):
    """What a look-up needs, in the order of addresses; replaced as a whole, so that readers need no lock."""

    starts: Numbers
    stops: Numbers
    views: list[memoryview]


class RegionTable:
    """The registered regions of one store. All methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[Region, memoryview] = {}
        self._replace({})

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
            at = int(starts.searchsorted(start, side="right"))
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
            np.array([region.address for region, _ in ordered], dtype=np.int64),
            np.array([region.address + region.num_bytes for region, _ in ordered], dtype=np.int64),
            [view for _, view in ordered],
        )

    def resolve(self, batch: Sequence[Segments]) -> list[Pieces]:
        """Return the views of each object of a batch; all are checked before this returns.

        A segments object that follows itself is resolved once and shares its ``Pieces``.

        Raises:
            StoreError: a segment does not lie inside one region or has no byte, or an object has no segment.
        """
        distinct: list[Segments] = []
        once_per_run(batch, distinct.append)
        made = iter(_resolved(self._registered, distinct) if distinct else ())
        return once_per_run(batch, lambda _: next(made))


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


def _resolved(registered: _Registered, objects: Sequence[Segments]) -> list[Pieces]:
    """Return the pieces of each object; numpy looks at the segments of all of them together."""
    counts, addresses, sizes = _numbers(registered, objects)
    at = registered.starts.searchsorted(addresses, side="right") - 1
    if at.min() < 0 or sizes.min() < 1 or (sizes > registered.stops[at] - addresses).any():
        _refuse_wrong(registered, objects)
    offsets = addresses - registered.starts[at]
    firsts = counts.cumsum() - counts
    is_grid, rows = _on_grid(counts, firsts, at, offsets, sizes)
    views, grids = _views(registered, ~is_grid.repeat(counts), at, offsets, sizes), {}
    made: list[Pieces] = []
    lone = 0
    for first, count, num_bytes, grid in zip(
        firsts.tolist(),
        counts.tolist(),
        np.add.reduceat(sizes, firsts).tolist(),
        is_grid.tolist(),
        strict=True,
    ):
        if not grid:
            made.append(Pieces(views[lone : lone + count], num_bytes))
            lone += count
            continue
        which = int(at[first]), num_bytes // count
        if which not in grids:
            grids[which] = _grid(registered.views[which[0]], which[1])
        made.append(GridPieces(grids[which], rows[first : first + count]))
    return made


def _views(
    registered: _Registered, wanted: NDArray[np.bool_], at: Numbers, offsets: Numbers, sizes: Numbers
) -> list[memoryview]:
    """Return the memory of the wanted segments."""
    starts = offsets[wanted]
    stops = starts + sizes[wanted]
    regions = [registered.views[region] for region in at[wanted].tolist()]
    return [
        region[start:stop]
        for region, start, stop in zip(regions, starts.tolist(), stops.tolist(), strict=True)
    ]


def _numbers(registered: _Registered, objects: Sequence[Segments]) -> tuple[Numbers, Numbers, Numbers]:
    """Return how many segments each object has, and the addresses and sizes of all segments."""
    try:
        counts = list(map(len, objects))
        pairs = list(chain.from_iterable(objects))
        flat = list(chain.from_iterable(pairs))
        if min(counts) and set(map(len, pairs)) == {2}:
            numbers = np.frombuffer(struct.pack(f"{len(flat)}q", *flat), dtype=np.int64)
            return np.array(counts), numbers[::2], numbers[1::2]
    except (TypeError, struct.error):
        pass
    return _refuse_wrong(registered, objects)


def _refuse_wrong(registered: _Registered, objects: Sequence[Segments]) -> NoReturn:
    """Say what is wrong with the first segment that is."""
    for segments in objects:
        for address, num_bytes in as_segments(segments):
            if not ((registered.starts <= address) & (address + num_bytes <= registered.stops)).any():
                raise StoreError(
                    f"segment of {num_bytes} bytes at {address:#x} does not lie inside one registered region"
                )
    raise StoreError("an object's segments are a list of (address, bytes)")


def _on_grid(
    counts: Numbers, firsts: Numbers, at: Numbers, offsets: Numbers, sizes: Numbers
) -> tuple[NDArray[np.bool_], Numbers]:
    """Tell which objects are many equal segments on one grid, and in which row of it each segment lies."""
    first_sizes = sizes[firsts]
    gains = (first_sizes < LARGE_SEGMENT_BYTES) | (counts * first_sizes >= RELEASE_BYTES)
    many = gains & (counts >= MIN_GRID_SEGMENTS)
    if not many.any():
        return many, offsets
    of = firsts.repeat(counts)
    rows, rest = np.divmod(offsets, sizes[of])
    # Segments copied without the GIL gain nothing, and numpy's items have less than 2 GiB.
    good = (rest == 0) & (sizes == sizes[of]) & (sizes < RELEASE_BYTES) & (at == at[of])
    return many & np.logical_and.reduceat(good, firsts), rows


def _grid(region: memoryview, size: int) -> Grid:
    return np.frombuffer(region, dtype=f"V{size}", count=len(region) // size)
