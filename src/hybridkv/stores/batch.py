"""What every store checks of a batch before it starts."""

import operator
from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

from hybridkv.errors import StoreError
from hybridkv.stores.base import MAX_KEY_CHARS, Segments

_KEY_CHARS = bytes(range(0x21, 0x7F))
_NONE_YET = object()

T = TypeVar("T")


def check_batch(keys: Sequence[str], **columns: Sized | None) -> None:
    """Check the keys of a batch, and that every list given beside them has one entry for each key.

    Args:
        keys: the batch's keys.
        columns: the other lists of the call by name; ``None`` stands for a list that was not given.

    Raises:
        StoreError: a key is no key, or a list has another length.
    """
    for name, column in columns.items():
        if column is not None and len(column) != len(keys):
            raise StoreError(f"{len(keys)} keys but {len(column)} {name}; give one for each key")
    try:
        # One scan of all keys together costs a fraction of one for each.
        good = _is_printable("".join(keys)) and all(0 < len(key) <= MAX_KEY_CHARS for key in keys)
    except TypeError:
        raise StoreError("a key is not a text") from None
    if not good:
        bad = next(key for key in keys if not is_key(key))
        raise StoreError(
            f"key {bad[:MAX_KEY_CHARS]!r} is not 1 to {MAX_KEY_CHARS} printable ASCII characters, no space"
        )


def is_key(text: str) -> bool:
    """Tell whether a text can be a key."""
    return _is_printable(text) and 0 < len(text) <= MAX_KEY_CHARS


def _is_printable(text: str) -> bool:
    return text.isascii() and not text.encode().translate(None, _KEY_CHARS)


def object_bytes(segments: Segments) -> int:
    """Return the size of one object in bytes, wherever its segments lie.

    Raises:
        StoreError: as ``as_segments``.
    """
    return sum(num_bytes for _, num_bytes in as_segments(segments))


def batch_bytes(batch: Sequence[Segments]) -> list[int]:
    """Return each object's size in bytes; a segments object that follows itself is measured once.

    Raises:
        StoreError: as ``object_bytes``.
    """
    return once_per_run(batch, object_bytes)


def once_per_run(batch: Sequence[Segments], make: Callable[[Segments], T]) -> list[T]:
    """Return ``make`` of each segments object; one that follows itself is made once and shared."""
    made: list[T] = []
    previous: object = _NONE_YET
    for segments in batch:
        if segments is previous:
            made.append(made[-1])
        else:
            made.append(make(segments))
            previous = segments
    return made


def as_segments(segments: object) -> list[tuple[int, int]]:
    """Return one object's segments as pairs of plain integers.

    Raises:
        StoreError: they are no list of (address, bytes), there is none, or one has no byte.
    """
    try:
        pairs = [(operator.index(address), operator.index(num_bytes)) for address, num_bytes in segments]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise StoreError("segments are pairs of integers: (address, bytes)") from None
    if not pairs:
        raise StoreError("an object without segments; every object has at least one byte")
    for _, num_bytes in pairs:
        if num_bytes < 1:
            raise StoreError(f"a segment of {num_bytes} bytes; every segment has at least one")
    return pairs
