"""Cuts a batch into parcels: calls small enough for Mooncake's client to survive.

An object whose segments are small is packed into one piece of staging memory: over TCP each piece costs as
much as tens of kilobytes. One whose segments are large moves in place, and only its trailer is staged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.stores.base import Segments
from hybridkv.stores.batch import as_segments
from hybridkv.stores.mooncake.client import MAX_SLICES
from hybridkv.stores.mooncake.staging import Slot
from hybridkv.stores.mooncake.values import group_of
from hybridkv.stores.regions import Pieces

MAX_IN_PLACE_BYTES = 256 * 2**20
"""What one call moves in place at most, so that it stays far from its deadline."""
_ALIGNMENT = 64


class Item(NamedTuple):
    """One object of a batch: its key, its name in Mooncake, and where it lies in memory."""

    key: str
    name: str
    pieces: Pieces
    segments: Segments


class Load(NamedTuple):
    """An item and how it travels.

    Attributes:
        item: the object.
        in_place: its segments, those that touch merged; empty where it is packed.
        start: of its staged bytes in the slot.
        num_staged: of these: the payload if it is packed, and the trailer.
        trailer_bytes: of the trailer; 0: there is none.
    """

    item: Item
    in_place: Sequence[tuple[int, int]]
    start: int
    num_staged: int
    trailer_bytes: int

    @property
    def is_packed(self) -> bool:
        """Whether its payload travels through the slot."""
        return not self.in_place

    def staged(self, slot: Slot) -> tuple[memoryview, memoryview]:
        """Return its payload, empty unless packed, and its trailer in the slot."""
        stop = self.start + self.num_staged
        return slot.view[self.start : stop - self.trailer_bytes], slot.view[stop - self.trailer_bytes : stop]


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
        """Of the objects, in Mooncake."""
        return [group_of(load.item.key) for load in self.loads.values()]

    @property
    def is_own(self) -> bool:
        """Whether its call touches nothing but staging memory."""
        return not self.num_in_place

    def places(self, slot: Slot) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each object's pieces of memory."""
        addresses, sizes = [], []
        for load in self.loads.values():
            pieces = [*load.in_place]
            if load.num_staged:
                pieces.append((slot.address + load.start, load.num_staged))
            addresses.append([address for address, _ in pieces])
            sizes.append([num_bytes for _, num_bytes in pieces])
        return addresses, sizes


def cut(items: Sequence[Item], *, pack_bytes: int, slot_bytes: int, trailer_bytes: int) -> Iterator[Parcel]:
    """Yield the parcels of a batch, in its order.

    No parcel has more pieces of memory or bytes than a call may have, unless one object alone has. None has a
    name twice: the library mixes up two targets of one name.

    Args:
        items: the objects.
        pack_bytes: an object whose segments are smaller on average is packed, unless it is one piece already.
        slot_bytes: of a staging slot.
        trailer_bytes: of each object's trailer.
    """
    parcel, names = Parcel(), set[str]()
    for idx, item in enumerate(items):
        num_bytes, in_place = item.pieces.num_bytes, _merged(item.segments)
        num_staged, num_in_place = trailer_bytes, num_bytes
        if not _stays(in_place, num_bytes, pack_bytes, trailer_bytes):
            in_place, num_staged, num_in_place = [], trailer_bytes + num_bytes, 0
        num_slices = len(in_place) + (num_staged > 0)
        is_full = (
            parcel.num_slices + num_slices > MAX_SLICES
            or parcel.num_staged + num_staged > slot_bytes
            or parcel.num_in_place + num_in_place > MAX_IN_PLACE_BYTES
        )
        if parcel.loads and (is_full or item.name in names):
            yield parcel
            parcel, names = Parcel(), set()
        parcel.loads[idx] = Load(item, in_place, parcel.num_staged, num_staged, trailer_bytes)
        parcel.num_slices += num_slices
        parcel.num_staged += -(-num_staged // _ALIGNMENT) * _ALIGNMENT
        parcel.num_in_place += num_in_place
        names.add(item.name)
    if parcel.loads:
        yield parcel


def _stays(in_place: Sequence[object], num_bytes: int, pack_bytes: int, trailer_bytes: int) -> bool:
    """Tell whether an object moves in place."""
    if len(in_place) == 1 and not trailer_bytes:
        return True  # as it lies it is what packing would make of it
    return len(in_place) * pack_bytes <= num_bytes and len(in_place) < MAX_SLICES


def _merged(segments: Segments) -> list[tuple[int, int]]:
    """Return one object's segments, those that touch merged into one."""
    merged: list[tuple[int, int]] = []
    for address, num_bytes in as_segments(segments):
        if merged and sum(merged[-1]) == address:
            merged[-1] = (merged[-1][0], merged[-1][1] + num_bytes)
        else:
            merged.append((address, num_bytes))
    return merged
