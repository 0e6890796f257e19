"""The store that is slow on purpose."""

from collections.abc import Sequence

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import ConfigError
from hybridkv.stores.base import GetResult, PutHint, PutResult, Segments, Store
from hybridkv.stores.wrappers.base import StoreWrapper


class LatencyStore(StoreWrapper):
    """Lets time pass before each batch call, as a distant store would.

    Args:
        inner: the store that does the work.
        per_call_s: seconds for each ``contains``, ``put``, ``get`` and ``discard``, >= 0.
        per_key_s: seconds for each key of these calls, >= 0.
        clock: lets the time pass; the machine's when ``None``.

    Raises:
        ConfigError: a delay is negative.
    """

    def __init__(
        self, inner: Store, *, per_call_s: float = 0.0, per_key_s: float = 0.0, clock: Clock | None = None
    ) -> None:
        if per_call_s < 0 or per_key_s < 0:
            raise ConfigError(f"per_call_s={per_call_s} and per_key_s={per_key_s} must not be negative")
        super().__init__(inner)
        self._per_call_s = per_call_s
        self._per_key_s = per_key_s
        self._clock = MonotonicClock() if clock is None else clock

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Wait, then ask the inner store."""
        self._wait(keys)
        return self._inner.contains(keys)

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> list[PutResult]:
        """Wait, then put into the inner store."""
        self._wait(keys)
        return self._inner.put(keys, sources, hints)

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> list[GetResult]:
        """Wait, then get from the inner store."""
        self._wait(keys)
        return self._inner.get(keys, targets)

    def discard(self, keys: Sequence[str]) -> None:
        """Wait, then discard from the inner store."""
        self._wait(keys)
        self._inner.discard(keys)

    def _wait(self, keys: Sequence[str]) -> None:
        self._clock.sleep(self._per_call_s + self._per_key_s * len(keys))
