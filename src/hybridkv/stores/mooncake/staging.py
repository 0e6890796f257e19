"""Memory of the store's own, through which small pieces are packed into one and trailers travel."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, LifoQueue

import numpy as np
from numpy.typing import NDArray

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One piece of staging memory: a whole number of pages.

    Attributes:
        address: of its first byte.
        view: its bytes, writable, of format B.
        give_back: lets others use it; called once, when no call touches it any more.
    """

    address: int
    view: memoryview
    give_back: Callable[[], None]


class Staging:
    """A few slots of equal size, handed to one parcel at a time.

    Args:
        num_bytes: of all slots together.
        num_slots: parcels that may be under way.
        register: makes memory usable for transfers.
        unregister: ends that.
    """

    def __init__(self, num_bytes: int, num_slots: int, register: Register, unregister: Unregister) -> None:
        self._register, self._unregister = register, unregister
        self.slot_bytes = num_bytes // num_slots // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory = _pages(self.slot_bytes * num_slots)
        register(self._memory.ctypes.data, self._memory.nbytes)
        self._free: LifoQueue[int] = LifoQueue()  # the last one used is warm
        for start in range(0, self._memory.nbytes, self.slot_bytes):
            self._free.put(start)

    def take(self, num_bytes: int, timeout_s: float) -> Slot | None:
        """Return a slot of at least ``num_bytes``, or ``None`` where none comes free in time.

        What is larger than a slot gets memory of its own.
        """
        if num_bytes > self.slot_bytes:
            return self._own(num_bytes)
        try:
            start = self._free.get(timeout=timeout_s) if timeout_s > 0 else self._free.get_nowait()
        except Empty:
            return None
        part = self._memory[start : start + self.slot_bytes]
        return Slot(part.ctypes.data, part.data, lambda: self._free.put(start))

    def _own(self, num_bytes: int) -> Slot:
        memory = _pages(num_bytes)
        address: int = memory.ctypes.data
        self._register(address, memory.nbytes)
        return Slot(address, memory.data, lambda: self._unregister(address))


def _pages(num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
