"""The keys of a batch as the records hold them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from hybridkv.stores.local.geometry import KEY_WORD, Field
from hybridkv.stores.local.index import Numbers, Words


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBatch:
    """Keys as words, so that a record is compared with few instructions.

    Attributes:
        hashes: (n,), xxh3_64 of each key.
        chars: (n,), length of each key.
        words: (n, w), the keys padded with zero bytes to the longest, in whole words.
    """

    hashes: Words
    chars: Words
    words: Words

    @classmethod
    def of(cls, keys: Sequence[str]) -> "KeyBatch":
        """Return a batch's keys; they are checked and at least one."""
        encoded = [key.encode() for key in keys]
        digests = b"".join(map(xxhash.xxh3_64_digest, encoded))
        lengths = list(map(len, encoded))
        longest = max(lengths)
        if min(lengths) < longest:
            encoded = [key.ljust(longest, b"\0") for key in encoded]
        padded = np.zeros((len(keys), -(-longest // 8) * 8), dtype=np.uint8)
        padded[:, :longest] = np.frombuffer(b"".join(encoded), dtype=np.uint8).reshape(-1, longest)
        return cls(
            hashes=np.frombuffer(digests, dtype=">u8").astype(np.uint64),
            chars=np.array(lengths, dtype=np.uint64),
            words=padded.view(np.uint64),
        )

    def take(self, positions: Numbers) -> "KeyBatch":
        """Return some of the keys."""
        return KeyBatch(
            hashes=self.hashes[positions], chars=self.chars[positions], words=self.words[positions]
        )


def key_of(record: Words) -> bytes | None:
    """Return a record's key, or ``None`` where it does not belong to the record's hash: damaged."""
    key = record[KEY_WORD:].tobytes()[: int(record[Field.KEY_CHARS])]
    return key if xxhash.xxh3_64_intdigest(key) == int(record[Field.HASH]) else None


checksum = xxhash.xxh3_64_intdigest
"""Returns the checksum of (a payload, its key's hash); seeded, so that a payload of another key fails too."""
