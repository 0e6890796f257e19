"""What lies under a name in Mooncake: a payload and, unless checksums are off, a trailer that proves it.

The trailer is 24 bytes, little-endian: magic (uint64), bytes of the payload (uint64), checksum (uint64). The
checksum is XXH3-64 of the payload, seeded with that of the name: one under another's name is found out too.
"""

import struct
from collections.abc import Sequence

import xxhash

from hybridkv.keys import without_rank
from hybridkv.stores.batch import is_key

MARK = "hkv:"
"""Begins every name, so that objects are told from what else the cluster holds."""
TRAILER_BYTES = 24

_TRAILER = struct.Struct("<QQQ")
_MAGIC = int.from_bytes(b"hkv-xxh3", "little")
_COMMA, _STAND_IN = ",", " "  # the master's HTTP interface separates names by commas; no key has a space


def name_of(key: str) -> str:
    """Return the name in Mooncake of a key."""
    return MARK + key.replace(_COMMA, _STAND_IN)


def key_of(name: str) -> str | None:
    """Return the key of a name in Mooncake, or ``None`` where it is not an object of ours."""
    key = name.removeprefix(MARK).replace(_STAND_IN, _COMMA)
    return key if name.startswith(MARK) and is_key(key) else None


def group_of(key: str) -> str:
    """Return the group in Mooncake of a key: the shards of all ranks are evicted together."""
    return MARK + without_rank(key)


def trailer(name: str, num_bytes: int, pieces: Sequence[memoryview]) -> bytes:
    """Return the trailer of a payload of ``num_bytes``, in some pieces, under a name."""
    if len(pieces) == 1:
        checksum = xxhash.xxh3_64_intdigest(pieces[0], seed=_seed(name))
    else:
        state = xxhash.xxh3_64(seed=_seed(name))
        for piece in pieces:
            state.update(piece)
        checksum = state.intdigest()
    return _TRAILER.pack(_MAGIC, num_bytes, checksum)


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
