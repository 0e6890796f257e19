"""What lies under a name in Mooncake: an object's payload and a trailer that proves it.

The trailer is 24 bytes, little-endian: magic (uint64), bytes of the payload (uint64), checksum (uint64). The
checksum is XXH3-64 of the payload, seeded with that of the name: one under another's name is found out too.
Without checksums the magic is another one.
"""

import struct
from collections.abc import Sequence

import xxhash

from hybridkv.keys import without_rank

MARK = "hkv:"
"""Begins every name, so that objects are told from what else the cluster holds."""
TRAILER_BYTES = 24

_TRAILER = struct.Struct("<QQQ")
_CHECKED = int.from_bytes(b"hkv-xxh3", "little")
_UNCHECKED = int.from_bytes(b"hkv-none", "little")
_COMMA, _STAND_IN = ",", " "  # the master's HTTP interface separates names by commas; no key has a space


def name_of(key: str) -> str:
    """Return the name in Mooncake of a key."""
    return MARK + key.replace(_COMMA, _STAND_IN)


def key_of(name: str) -> str | None:
    """Return the key of a name in Mooncake, or ``None`` where it is not an object of ours."""
    return name.removeprefix(MARK).replace(_STAND_IN, _COMMA) if name.startswith(MARK) else None


def group_of(key: str) -> str:
    """Return the group in Mooncake of a key: the shards of all ranks are evicted together."""
    return MARK + without_rank(key)


def trailer(name: str, num_bytes: int, pieces: Sequence[memoryview] | None) -> bytes:
    """Return the trailer of a payload.

    Args:
        name: under which it is stored.
        num_bytes: of the payload.
        pieces: the payload, which is hashed; ``None`` for a trailer without checksum.
    """
    if pieces is None:
        return _TRAILER.pack(_UNCHECKED, num_bytes, 0)
    if len(pieces) == 1:
        checksum = xxhash.xxh3_64_intdigest(pieces[0], seed=_seed(name))
    else:
        state = xxhash.xxh3_64(seed=_seed(name))
        for piece in pieces:
            state.update(piece)
        checksum = state.intdigest()
    return _TRAILER.pack(_CHECKED, num_bytes, checksum)


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
