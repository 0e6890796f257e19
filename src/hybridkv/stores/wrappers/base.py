"""The store that passes every call on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.stores.base import GetResult, PutHint, PutResult, Segments, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.stores.regions import Region

_CAPABILITIES = ("list", "stats")


class StoreWrapper:
    """Passes every call on to another store.

    A wrapper lists objects and reports stats exactly if the inner store does. Closing it closes that store.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        # Not methods of the class: isinstance(store, ListsObjects) must tell the truth.
        for name in _CAPABILITIES:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def register(self, buffer: "Buffer") -> "Region":
        """Register a buffer with the inner store."""
        return self._inner.register(buffer)

    def unregister(self, region: "Region") -> None:
        """Unregister a region of the inner store."""
        self._inner.unregister(region)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Ask the inner store."""
        return self._inner.contains(keys)

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> list[PutResult]:
        """Put into the inner store."""
        return self._inner.put(keys, sources, hints)

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> list[GetResult]:
        """Get from the inner store."""
        return self._inner.get(keys, targets)

    def discard(self, keys: Sequence[str]) -> None:
        """Discard from the inner store."""
        self._inner.discard(keys)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()
