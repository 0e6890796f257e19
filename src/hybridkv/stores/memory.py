"""The reference store: one process, one dict, one lock."""

import builtins
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, filterfalse
from typing import TYPE_CHECKING

from hybridkv.errors import ConfigError, StoreClosedError
from hybridkv.stores.base import GetResult, ObjectInfo, PutHint, PutResult, Segments, StoreStats
from hybridkv.stores.batch import batch_bytes, check_batch
from hybridkv.stores.eviction import EvictionPolicy, LruEviction
from hybridkv.stores.regions import Pieces, Region, RegionTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.stores.registry import StoreUri

# Enum members are looked up through their class in every pass of a loop; names of this module cost less.
_STORED, _ALREADY, _REFUSED = PutResult.STORED, PutResult.ALREADY, PutResult.REFUSED
_OK, _ABSENT, _CORRUPT = GetResult.OK, GetResult.ABSENT, GetResult.CORRUPT

EvictListener = Callable[[list[tuple[str, int]]], None]
"""Told of the (key, bytes) of the objects that one ``put`` evicted."""


class MemoryStore:
    """Objects in this process's memory; a ``Store`` that also ``ListsObjects`` and ``ReportsStats``.

    A batch is put as if key by key, but never evicts an object of its own keys, whether this call stored or
    found it: later keys are refused instead.

    Args:
        capacity_bytes: most payload bytes held at a time, >= 1; ``None`` for no limit.
        keep_payloads: ``False`` keeps sizes only, for simulations: no memory is read or written, segments may
            have any address, and a ``get`` that is ``OK`` leaves the target as it was.
        eviction: the order of eviction, used by no other store; least recently used when ``None``.
        on_evict: called once by each ``put`` that evicts, on its thread, after the store has changed and
            before ``put`` returns. It holds no lock: with several threads putting, calls may interleave.

    Raises:
        ConfigError: the capacity is below 1 byte.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        keep_payloads: bool = True,
        eviction: EvictionPolicy | None = None,
        on_evict: EvictListener | None = None,
    ) -> None:
        if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 1):
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes!r}; give an integer >= 1, or None for no limit"
            )
        self._capacity_bytes = capacity_bytes
        self._keep_payloads = keep_payloads
        self._eviction = LruEviction() if eviction is None else eviction
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._regions = RegionTable()
        self._sizes: dict[str, int] = {}
        self._payloads: dict[str, bytes] = {}
        self._used_bytes = self._stored_objects = self._stored_bytes = 0
        self._evicted_objects = self._evicted_bytes = 0
        self._closed = False

    def register(self, buffer: "Buffer") -> Region:
        """Make a buffer usable for segments; see ``RegionTable.register``."""
        with self._lock:
            self._check_open()
            return self._regions.register(buffer)

    def unregister(self, region: Region) -> None:
        """Forget a region; see ``RegionTable.unregister``."""
        with self._lock:
            self._check_open()
            self._regions.unregister(region)

    def contains(self, keys: Sequence[str]) -> builtins.list[bool]:
        """Tell for each key whether its object is stored."""
        check_batch(keys)
        with self._lock:
            self._check_open()
            held = self._sizes
            return [key in held for key in keys]

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> builtins.list[PutResult]:
        """Copy objects in, evicting others where they need room."""
        check_batch(keys, sources=sources, hints=hints)
        with self._lock:
            self._check_open()
            pieces, sizes = self._measure(sources)
            results, added, victims = self._admit(keys, sizes)
            is_stored = [result is _STORED for result in results]
            payloads = [piece.gather() for piece in compress(pieces, is_stored)]
            # Nothing has changed so far, and what follows fails only if the policy does.
            evicted = [] if self._on_evict is None else [(key, self._sizes[key]) for key in victims]
            self._evict(victims)
            self._sizes.update(added)
            self._payloads.update(zip(added, payloads, strict=False))
            self._eviction.stored(list(added), None if hints is None else list(compress(hints, is_stored)))
            self._count_stored(len(added), sum(added.values()))
        if evicted and self._on_evict is not None:
            self._on_evict(evicted)
        return results

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> builtins.list[GetResult]:
        """Copy objects out and make them the most recently used."""
        check_batch(keys, targets=targets)
        with self._lock:
            self._check_open()
            pieces, sizes = self._measure(targets)
            results = [self._find(key, size) for key, size in zip(keys, sizes, strict=True)]
            is_served = [result is _OK for result in results]
            served = list(compress(keys, is_served))
            payloads = [self._payloads[key] for key in served] if self._keep_payloads else []
            self._eviction.used(served)
        # Payloads are immutable: the copies are right even when their objects are evicted meanwhile.
        for piece, payload in zip(compress(pieces, is_served), payloads, strict=False):
            piece.scatter(payload)
        return results

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects; absent keys are no error."""
        check_batch(keys)
        with self._lock:
            self._check_open()
            self._remove([key for key in dict.fromkeys(keys) if key in self._sizes])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects, as they were at the call, whose key begins with ``prefix``."""
        with self._lock:
            self._check_open()
            found = [item for item in self._sizes.items() if item[0].startswith(prefix)]
        return (ObjectInfo(key=key, num_bytes=size) for key, size in found)

    def stats(self) -> StoreStats:
        """Return the counts of this moment; discarded objects do not count as evicted."""
        with self._lock:
            self._check_open()
            return StoreStats(
                objects=len(self._sizes),
                used_bytes=self._used_bytes,
                capacity_bytes=self._capacity_bytes,
                stored_objects=self._stored_objects,
                stored_bytes=self._stored_bytes,
                evicted_objects=self._evicted_objects,
                evicted_bytes=self._evicted_bytes,
            )

    def close(self) -> None:
        """Drop all objects and regions; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._sizes.clear()
            self._payloads.clear()
            self._regions.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the memory store is closed")

    def _measure(self, batch: Sequence[Segments]) -> tuple[Sequence[Pieces], builtins.list[int]]:
        """Return the batch's checked views, none when no payloads are kept, and its sizes."""
        if not self._keep_payloads:
            return (), batch_bytes(batch)
        pieces = self._regions.resolve(batch)
        return pieces, [piece.num_bytes for piece in pieces]

    def _find(self, key: str, size: int) -> GetResult:
        held = self._sizes.get(key)
        if held is None:
            return _ABSENT
        return _OK if held == size else _CORRUPT

    def _admit(
        self, keys: Sequence[str], sizes: Sequence[int]
    ) -> tuple[builtins.list[PutResult], dict[str, int], builtins.list[str]]:
        """Decide on a batch, changing nothing: the results, the sizes of what to add, and whom to evict."""
        held = self._sizes
        capacity = sys.maxsize if self._capacity_bytes is None else self._capacity_bytes
        own = held.keys() & keys
        pinned = sum(map(held.__getitem__, own))  # what this call must not evict
        free = capacity - self._used_bytes
        order = filterfalse(own.__contains__, self._eviction.victims())
        results, added, victims = [], dict[str, int](), builtins.list[str]()
        for key, size in zip(keys, sizes, strict=True):
            if key in own or key in added:
                results.append(_ALREADY)
                continue
            while free < size and pinned + size <= capacity and (victim := next(order, None)) is not None:
                victims.append(victim)
                free += held[victim]
            if free < size:
                results.append(_REFUSED)
                continue
            free -= size
            pinned += size
            added[key] = size
            results.append(_STORED)
        return results, added, victims

    def _evict(self, keys: Sequence[str]) -> None:
        before = self._used_bytes
        self._remove(keys)
        self._evicted_objects += len(keys)
        self._evicted_bytes += before - self._used_bytes

    def _remove(self, keys: Sequence[str]) -> None:
        self._used_bytes -= sum(map(self._sizes.pop, keys))
        for key in keys if self._keep_payloads else ():
            del self._payloads[key]
        self._eviction.discarded(keys)

    def _count_stored(self, num_objects: int, num_bytes: int) -> None:
        self._used_bytes += num_bytes
        self._stored_objects += num_objects
        self._stored_bytes += num_bytes


def open_memory(
    uri: "StoreUri", *, keep_payloads: bool = True, on_evict: EvictListener | None = None
) -> MemoryStore:
    """Open ``memory://?capacity=2GiB``; without a capacity there is no limit.

    Args:
        uri: the parsed URI.
        keep_payloads: as in ``MemoryStore``.
        on_evict: as in ``MemoryStore``.

    Raises:
        ConfigError: the URI names a place, an unknown setting or no valid capacity.
    """
    uri.check_settings("capacity")
    if uri.authority or uri.path:
        raise ConfigError("a memory store has no place: write memory://?capacity=2GiB")
    return MemoryStore(uri.num_bytes("capacity"), keep_payloads=keep_payloads, on_evict=on_evict)
