"""Cuts a batch into parcels: calls small enough for Mooncake's client to survive.

An object whose segments are small is packed into one piece of staging memory: over TCP each piece costs as
much as tens of kilobytes. One whose segments are large moves in place, and only its trailer is staged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridkv.stores.base import Segments
from hybridkv.stores.batch import as_segments
from hybridkv.stores.mooncake.client import MAX_SLICES
from hybridkv.stores.mooncake.staging import Slot
from hybridkv.stores.mooncake.values import TRAILER_BYTES
from hybridkv.stores.regions import Pieces

MAX_IN_PLACE_BYTES = 64 * 2**20
"""What one call moves in place at most, so that it stays far from its deadline."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a batch: what it is called in Mooncake and where it lies in memory."""

    name: str
    group: str
    pieces: Pieces
    segments: Segments


@dataclass(frozen=True, slots=True)
class Load:
    """An item and how it travels.

    Attributes:
        item: the object.
        in_place: its segments, those that touch merged; empty where it is packed.
        start: of its staged bytes in the slot: payload and trailer, or the trailer alone.
    """

    item: Item
    in_place: Sequence[tuple[int, int]]
    start: int

    @property
    def is_packed(self) -> bool:
        """Whether its payload travels through the slot."""
        return not self.in_place

    @property
    def num_staged(self) -> int:
        """Bytes in the slot."""
        return TRAILER_BYTES + (self.item.pieces.num_bytes if self.is_packed else 0)

    def staged(self, slot: Slot) -> memoryview:
        """Return its bytes in the slot; the trailer is the last of them."""
        return slot.view[self.start : self.start + self.num_staged]


@dataclass(slots=True)
class Parcel:
    """The objects of one call, by their places in the batch."""

    loads: dict[int, Load] = field(default_factory=dict)
    num_slices: int = 0
    num_staged: int = 0
    num_in_place: int = 0

    @property
    def names(self) -> list[str]:
        """Of the objects."""
        return [load.item.name for load in self.loads.values()]

    @property
    def groups(self) -> list[str]:
        """Of the objects."""
        return [load.item.group for load in self.loads.values()]

    @property
    def is_own(self) -> bool:
        """Whether its call touches nothing but staging memory."""
        return not self.num_in_place

    def places(self, slot: Slot) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each object's pieces of memory."""
        addresses, sizes = [], []
        for load in self.loads.values():
            pieces = [*load.in_place, (slot.address + load.start, load.num_staged)]
            addresses.append([address for address, _ in pieces])
            sizes.append([num_bytes for _, num_bytes in pieces])
        return addresses, sizes


def cut(items: Sequence[Item], pack_bytes: int, slot_bytes: int) -> Iterator[Parcel]:
    """Yield the parcels of a batch, in its order.

    No parcel has more pieces of memory or bytes than a call may have, unless one object alone has. None has a
    name twice: the library mixes up two targets of one name.

    Args:
        items: the objects.
        pack_bytes: an object whose segments are smaller on average is packed.
        slot_bytes: of a staging slot.
    """
    parcel, names = Parcel(), set[str]()
    for idx, item in enumerate(items):
        in_place = _merged(item.segments)
        num_bytes = item.pieces.num_bytes
        if len(in_place) * pack_bytes > num_bytes or len(in_place) >= MAX_SLICES:
            in_place = []
        load = Load(item, in_place, parcel.num_staged)
        is_full = (
            parcel.num_slices + len(in_place) + 1 > MAX_SLICES
            or parcel.num_staged + load.num_staged > slot_bytes
            or (parcel.num_in_place and parcel.num_in_place + num_bytes > MAX_IN_PLACE_BYTES)
        )
        if parcel.loads and (is_full or item.name in names):
            yield parcel
            parcel, names = Parcel(), set()
            load = Load(item, in_place, 0)
        parcel.loads[idx] = load
        parcel.num_slices += len(in_place) + 1
        parcel.num_staged += -(-load.num_staged // _ALIGNMENT) * _ALIGNMENT
        parcel.num_in_place += 0 if load.is_packed else num_bytes
        names.add(item.name)
    if parcel.loads:
        yield parcel


def _merged(segments: Segments) -> list[tuple[int, int]]:
    """Return one object's segments, those that touch merged into one."""
    merged: list[tuple[int, int]] = []
    for address, num_bytes in as_segments(segments):
        if merged and sum(merged[-1]) == address:
            merged[-1] = (merged[-1][0], merged[-1][1] + num_bytes)
        else:
            merged.append((address, num_bytes))
    return merged
