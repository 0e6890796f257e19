"""The store that counts and times what is done with it."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.stores.base import GetResult, PutHint, PutResult, Segments, Store
from hybridkv.stores.batch import batch_bytes
from hybridkv.stores.wrappers.base import StoreWrapper

Operation = Literal["contains", "put", "get", "discard"]
"""The calls of a store that carry a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCounts:
    """What one operation of a ``MeteredStore`` has done so far.

    Attributes:
        calls: all of them, also those that raised.
        errors: calls that raised.
        num_keys: keys of all calls, also of those that raised.
        num_bytes: bytes of the objects that were stored by ``put`` or served by ``get``.
        seconds: spent in the inner store.
        results: how often each result occurred, by its value: ``stored``, ``ok``, ...; of ``contains``,
            ``present`` and ``absent``.
    """

    calls: int = 0
    errors: int = 0
    num_keys: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    results: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class _Meter:
    """The running counts of one operation."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = self._errors = self._num_keys = self._num_bytes = 0
        self._seconds = 0.0
        self._results: Counter[str] = Counter()

    @contextmanager
    def call(self, num_keys: int) -> Iterator[None]:
        """Count and time the body as one call."""
        errors = 1
        start_s = self._clock.now_s()
        try:
            yield
            errors = 0
        finally:
            seconds = self._clock.now_s() - start_s
            with self._lock:
                self._calls += 1
                self._errors += errors
                self._num_keys += num_keys
                self._seconds += seconds

    def add(self, results: Sequence[str], num_bytes: int = 0) -> None:
        with self._lock:
            self._results.update(results)
            self._num_bytes += num_bytes

    def counts(self) -> OperationCounts:
        with self._lock:
            return OperationCounts(
                calls=self._calls,
                errors=self._errors,
                num_keys=self._num_keys,
                num_bytes=self._num_bytes,
                seconds=self._seconds,
                results=MappingProxyType(dict(self._results)),
            )


class MeteredStore(StoreWrapper):
    """Counts calls, keys, bytes, results and seconds of each operation.

    Args:
        inner: the store that does the work.
        clock: measures the seconds; the machine's when ``None``.
    """

    def __init__(self, inner: Store, clock: Clock | None = None) -> None:
        super().__init__(inner)
        clock = MonotonicClock() if clock is None else clock
        operations: tuple[Operation, ...] = ("contains", "put", "get", "discard")
        self._meters: dict[Operation, _Meter] = {operation: _Meter(clock) for operation in operations}

    def counts(self, operation: Operation) -> OperationCounts:
        """Return the counts of one operation at this moment."""
        return self._meters[operation].counts()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Ask the inner store and count."""
        meter = self._meters["contains"]
        with meter.call(len(keys)):
            found = self._inner.contains(keys)
        meter.add(["present" if is_present else "absent" for is_present in found])
        return found

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> list[PutResult]:
        """Put into the inner store and count."""
        meter = self._meters["put"]
        with meter.call(len(keys)):
            results = self._inner.put(keys, sources, hints)
        meter.add([result.value for result in results], _moved_bytes(sources, results))
        return results

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> list[GetResult]:
        """Get from the inner store and count."""
        meter = self._meters["get"]
        with meter.call(len(keys)):
            results = self._inner.get(keys, targets)
        meter.add([result.value for result in results], _moved_bytes(targets, results))
        return results

    def discard(self, keys: Sequence[str]) -> None:
        """Discard from the inner store and count."""
        with self._meters["discard"].call(len(keys)):
            self._inner.discard(keys)


def _moved_bytes(batch: Sequence[Segments], results: Sequence[PutResult] | Sequence[GetResult]) -> int:
    moved = (PutResult.STORED, GetResult.OK)
    return sum(size for size, result in zip(batch_bytes(batch), results, strict=True) if result in moved)
