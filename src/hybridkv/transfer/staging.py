"""Staging memory: one registered buffer, cut into slots of equal size, which bounds the bytes in flight."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.stores.base import Store


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One slot of a ``StagingPool``.

    Attributes:
        index: of the slot.
        memory: uint8, shape (slot bytes,), inside the region that the store knows.
        address: of its first byte.
    """

    index: int
    memory: NDArray[np.uint8]
    address: int


class StagingPool:
    """Hands out slots; whoever holds one owns its bytes until ``release``.

    Args:
        store: the buffer is registered with it.
        slot_bytes: size of a slot, a multiple of 64, >= 64.
        num_slots: >= 1; slot_bytes * num_slots is the staging budget.
    """

    def __init__(self, store: Store, *, slot_bytes: int, num_slots: int) -> None:
        if slot_bytes < 64 or slot_bytes % 64 or num_slots < 1:
            raise ConfigError(
                f"staging of {num_slots} slots of {slot_bytes} bytes; give multiples of 64 bytes"
            )
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        # Cache lines, so that no copy runs into the slow path of unaligned pages.
        buffer = np.zeros(slot_bytes * num_slots + 64, dtype=np.uint8)
        start = -buffer.ctypes.data % 64
        self._buffer = buffer[start : start + slot_bytes * num_slots]
        self._store = store
        self._region = store.register(self._buffer.data)
        self._free = list(range(num_slots))
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        with self._changed:
            return len(self._free)

    def acquire(self, timeout_s: float) -> Slot | None:
        """Return a slot, or ``None`` when none came free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            index = self._free.pop()
        start = index * self.slot_bytes
        return Slot(index, self._buffer[start : start + self.slot_bytes], self._region.address + start)

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot.index)
            self._changed.notify()

    def close(self) -> None:
        """Forget the buffer; the caller has no store call in flight that uses it."""
        self._store.unregister(self._region)
