"""Moves objects between registered memory and Mooncake in parcels: batches that its client survives."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.mooncake.client import MAX_CALLS, OK, Client
from hybridkv.stores.mooncake.connection import Connection
from hybridkv.stores.mooncake.parcels import Item, Load, Parcel, cut
from hybridkv.stores.mooncake.settings import MooncakeSettings
from hybridkv.stores.mooncake.staging import Slot, Staging
from hybridkv.stores.mooncake.values import trailer as trailer_of

MAX_UNDER_WAY = 2
"""Parcels of one batch: one travels while another is packed or unpacked; more only compete for the wire."""
NOT_MOVED = 1 - 2**30
"""The code of an object that was not moved: Mooncake stopped answering before its turn."""
SPOILED = 2 - 2**30
"""The code of an object whose bytes are not what was stored."""


class _UnderWay(NamedTuple):
    """A parcel whose call was started."""

    parcel: Parcel
    slot: Slot
    client: Client
    future: Future[list[int]]


class Transfers:
    """Puts and gets the objects of a batch, several parcels at a time.

    Packing, hashing and unpacking run on the caller's thread while other parcels are on their way.

    Args:
        connection: carries the calls.
        settings: how objects travel.
    """

    def __init__(self, connection: Connection, settings: MooncakeSettings) -> None:
        self._connection, self._settings = connection, settings
        self._staging = Staging(settings.staging_bytes, MAX_CALLS, connection.register, connection.unregister)

    def put(self, items: Sequence[Item]) -> list[int]:
        """Store objects of different names; return each one's code.

        Raises:
            StoreUnavailableError: nothing was stored.
        """

        def call(parcel: Parcel, slot: Slot, client: Client) -> list[int]:
            return client.put(parcel.names, *parcel.places(slot), groups=parcel.groups)

        return self._carry(items, self._pack, call, lambda _load, _slot: OK)

    def get(self, items: Sequence[Item]) -> list[int]:
        """Fetch objects over their memory and verify them; return each one's code.

        Raises:
            StoreUnavailableError: nothing was fetched.
        """

        def call(parcel: Parcel, slot: Slot, client: Client) -> list[int]:
            return client.get(parcel.names, *parcel.places(slot))

        return self._carry(items, lambda _load, _slot: None, call, self._unpack)

    def _pack(self, load: Load, slot: Slot) -> None:
        """Write what is staged of an object into the slot."""
        payload, trailer = load.staged(slot)
        if load.is_packed:
            load.item.pieces.gather_into(payload)
        if trailer:
            trailer[:] = _trailer(load, payload)

    def _unpack(self, load: Load, slot: Slot) -> int:
        """Verify an object that was fetched, and scatter it where it was packed."""
        if not load.num_staged:
            return OK
        payload, trailer = load.staged(slot)
        if trailer and trailer != _trailer(load, payload):
            return SPOILED
        if load.is_packed:
            load.item.pieces.scatter(payload)
        return OK

    def _carry(
        self,
        items: Sequence[Item],
        pack: Callable[[Load, Slot], None],
        call: Callable[[Parcel, Slot, Client], list[int]],
        unpack: Callable[[Load, Slot], int],
    ) -> list[int]:
        """Send all parcels on their way, each when a slot is free, and return the objects' codes."""
        codes = [NOT_MOVED] * len(items)
        under_way: deque[_UnderWay] = deque()
        failure: StoreUnavailableError | None = None
        parcels = cut(
            items,
            pack_bytes=self._settings.pack_bytes,
            slot_bytes=self._staging.slot_bytes,
            trailer_bytes=self._settings.trailer_bytes,
        )
        try:
            for parcel in parcels:
                slot = self._slot(parcel, under_way, codes, unpack)
                try:
                    for load in parcel.loads.values():
                        pack(load, slot)
                    client, future = self._connection.start(partial(call, parcel, slot))
                except BaseException:
                    slot.give_back()
                    raise
                under_way.append(_UnderWay(parcel, slot, client, future))
        except StoreUnavailableError as error:
            failure = error
        finally:
            while under_way:  # also after a failure: a call may use memory of the caller's
                try:
                    self._collect(under_way.popleft(), codes, unpack)
                except StoreUnavailableError as error:
                    failure = failure or error
        if failure is not None and codes == [NOT_MOVED] * len(items):
            raise failure
        return codes

    def _slot(
        self,
        parcel: Parcel,
        under_way: deque[_UnderWay],
        codes: list[int],
        unpack: Callable[[Load, Slot], int],
    ) -> Slot:
        """Return a free slot; nobody waits for one while holding others."""
        while True:
            if len(under_way) == MAX_UNDER_WAY:
                self._collect(under_way.popleft(), codes, unpack)
            slot = self._staging.take(parcel.num_staged, 0 if under_way else self._settings.timeout_s)
            if slot is not None:
                return slot
            if not under_way:
                raise StoreUnavailableError("no staging memory came free: calls of Mooncake hang")
            self._collect(under_way.popleft(), codes, unpack)

    def _collect(self, sent: _UnderWay, codes: list[int], unpack: Callable[[Load, Slot], int]) -> None:
        """Wait for a parcel and note its objects' codes."""
        try:
            answers = self._connection.finish(sent.client, sent.future, is_patient=not sent.parcel.is_own)
        except BaseException:
            sent.client.when_over(sent.future, sent.slot.give_back)
            raise
        try:
            for (idx, load), code in zip(sent.parcel.loads.items(), answers, strict=True):
                codes[idx] = unpack(load, sent.slot) if code == OK else code
        finally:
            sent.slot.give_back()


def _trailer(load: Load, payload: memoryview) -> bytes:
    """Return the trailer of the bytes that lie in memory."""
    pieces = [payload] if load.is_packed else load.item.pieces.views
    return trailer_of(load.item.name, load.item.pieces.num_bytes, pieces)
