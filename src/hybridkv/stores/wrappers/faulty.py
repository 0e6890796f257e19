"""The store that fails on purpose."""

import ctypes
import random
import threading
from collections.abc import Mapping, Sequence
from enum import Enum

from hybridkv.errors import ConfigError, StoreUnavailableError
from hybridkv.stores.base import GetResult, PutHint, PutResult, Segments, Store
from hybridkv.stores.batch import check_batch
from hybridkv.stores.wrappers.base import StoreWrapper


class Fault(Enum):
    """What a ``FaultyStore`` can do wrong."""

    UNAVAILABLE = "unavailable"
    """Any batch call: raises ``StoreUnavailableError`` and does nothing."""
    REFUSED = "refused"
    """A key of ``put``: refused, nothing is stored."""
    FAILED = "failed"
    """A key of ``put`` or ``get``: failed, nothing is stored and no target touched."""
    ABSENT = "absent"
    """A key of ``get``: reported absent whatever is stored."""
    CORRUPT = "corrupt"
    """A key of ``get``: reported corrupt, target untouched."""
    FLIPPED = "flipped"
    """A key of ``get`` that is served: ``OK``, but the target's first byte has all its bits flipped."""


_PUT_FAULTS = {Fault.REFUSED: PutResult.REFUSED, Fault.FAILED: PutResult.FAILED}
_GET_FAULTS = {
    Fault.FAILED: GetResult.FAILED,
    Fault.ABSENT: GetResult.ABSENT,
    Fault.CORRUPT: GetResult.CORRUPT,
    Fault.FLIPPED: GetResult.OK,
}


class FaultyStore(StoreWrapper):
    """Fails on purpose: scripted by ``fail_calls`` and ``inject``, or at random by ``rates``.

    A key with a fault other than ``FLIPPED`` is not passed to the inner store; the rest of its batch is.

    Args:
        inner: the store that does the work; one that moves no bytes cannot have ``FLIPPED``.
        rates: probability of each fault, in [0, 1], for each call or key that it applies to.
        seed: of the random faults; equal seeds and calls give equal faults.

    Raises:
        ConfigError: a rate is not in [0, 1].

    Example:
        >>> from hybridkv.stores.memory import MemoryStore
        >>> store = FaultyStore(MemoryStore())
        >>> store.inject("key", Fault.FAILED)
        >>> region = store.register(bytearray(8))
        >>> [store.put(["key"], [[(region.address, 8)]])[0].value for _ in range(2)]
        ['failed', 'stored']
    """

    def __init__(self, inner: Store, *, rates: Mapping[Fault, float] | None = None, seed: int = 0) -> None:
        super().__init__(inner)
        self._rates = dict(rates or {})
        for fault, rate in self._rates.items():
            if not 0 <= rate <= 1:
                raise ConfigError(f"the rate of {fault.value} is {rate}; a probability is in [0, 1]")
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._lock = threading.Lock()
        self._failing_calls = 0
        self._scripts: dict[str, list[Fault]] = {}

    def fail_calls(self, num_calls: int = 1) -> None:
        """Let just the next ``num_calls`` batch calls raise ``StoreUnavailableError``."""
        with self._lock:
            self._failing_calls = num_calls

    def inject(self, key: str, *faults: Fault) -> None:
        """Append faults to a key's script: each strikes once, at the next call that it applies to.

        Raises:
            ConfigError: ``UNAVAILABLE``, which concerns whole calls.
        """
        if Fault.UNAVAILABLE in faults:
            raise ConfigError("unavailable concerns whole calls, not keys; use fail_calls")
        with self._lock:
            self._scripts.setdefault(key, []).extend(faults)

    def heal(self) -> None:
        """Forget all scripts and rates: from now on nothing fails."""
        with self._lock:
            self._failing_calls = 0
            self._scripts.clear()
            self._rates.clear()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Ask the inner store unless the call fails."""
        self._begin_call()
        return self._inner.contains(keys)

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> list[PutResult]:
        """Put those keys into the inner store that no fault strikes."""
        check_batch(keys, sources=sources, hints=hints)
        self._begin_call()
        faults = self._strike(keys, _PUT_FAULTS)
        passed = [idx for idx, fault in enumerate(faults) if fault is None]
        inner = iter(
            self._inner.put(
                [keys[idx] for idx in passed],
                [sources[idx] for idx in passed],
                None if hints is None else [hints[idx] for idx in passed],
            )
        )
        return [next(inner) if fault is None else _PUT_FAULTS[fault] for fault in faults]

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> list[GetResult]:
        """Get those keys from the inner store that no fault strikes."""
        check_batch(keys, targets=targets)
        self._begin_call()
        faults = self._strike(keys, _GET_FAULTS)
        passed = [idx for idx, fault in enumerate(faults) if fault in (None, Fault.FLIPPED)]
        results = [GetResult.OK if fault is None else _GET_FAULTS[fault] for fault in faults]
        served = self._inner.get([keys[idx] for idx in passed], [targets[idx] for idx in passed])
        for idx, result in zip(passed, served, strict=True):
            results[idx] = result
            if faults[idx] is Fault.FLIPPED and result is GetResult.OK:
                # The inner store has just written to this address.
                ctypes.c_ubyte.from_address(targets[idx][0][0]).value ^= 0xFF
        return results

    def discard(self, keys: Sequence[str]) -> None:
        """Discard from the inner store unless the call fails."""
        self._begin_call()
        self._inner.discard(keys)

    def _begin_call(self) -> None:
        with self._lock:
            if self._failing_calls:
                self._failing_calls -= 1
            elif self._random.random() >= self._rates.get(Fault.UNAVAILABLE, 0.0):
                return
        raise StoreUnavailableError("the store was told to be unavailable for this call")

    def _strike(self, keys: Sequence[str], applicable: Mapping[Fault, object]) -> list[Fault | None]:
        """Return each key's fault in this call, if any; scripts come before chance."""
        with self._lock:
            return [self._scripted(key, applicable) or self._by_chance(applicable) for key in keys]

    def _scripted(self, key: str, applicable: Mapping[Fault, object]) -> Fault | None:
        script = self._scripts.get(key, [])
        fault = next((fault for fault in script if fault in applicable), None)
        if fault is not None:
            script.remove(fault)
        return fault

    def _by_chance(self, applicable: Mapping[Fault, object]) -> Fault | None:
        for fault in applicable:
            if fault in self._rates and self._random.random() < self._rates[fault]:
                return fault
        return None
