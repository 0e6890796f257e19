"""What every store checks of a batch before it starts."""

from collections.abc import Sequence, Sized

from hybridkv.errors import StoreError
from hybridkv.stores.base import MAX_KEY_CHARS, Segments

_KEY_CHARS = bytes(range(0x21, 0x7F))


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
    # One scan of all keys together costs a fraction of one for each.
    if not _is_printable("".join(keys)) or not all(0 < len(key) <= MAX_KEY_CHARS for key in keys):
        bad = next(key for key in keys if not (_is_printable(key) and 0 < len(key) <= MAX_KEY_CHARS))
        raise StoreError(
            f"key {bad[:MAX_KEY_CHARS]!r} is not 1 to {MAX_KEY_CHARS} printable ASCII characters, no space"
        )


def _is_printable(text: str) -> bool:
    return text.isascii() and not text.encode().translate(None, _KEY_CHARS)


def object_bytes(segments: Segments) -> int:
    """Return the size of one object in bytes, wherever its segments lie.

    Raises:
        StoreError: there is no segment, or one has no byte.
    """
    total = 0
    for _, num_bytes in segments:
        if num_bytes < 1:
            raise StoreError(f"a segment of {num_bytes} bytes; every segment has at least one")
        total += num_bytes
    if not total:
        raise StoreError("an object without segments; every object has at least one byte")
    return total


def batch_bytes(batch: Sequence[Segments]) -> list[int]:
    """Return each object's size in bytes; a segments object that follows itself is measured once.

    Raises:
        StoreError: as ``object_bytes``.
    """
    sizes = []
    previous: Segments | None = None
    size = 0
    for segments in batch:
        if segments is not previous:
            size, previous = object_bytes(segments), segments
        sizes.append(size)
    return sizes
