"""What lies where in the two files of a local store; docs/local-store.md draws it.

Everything follows from the capacity and ``FORMAT_VERSION``. All numbers are little-endian 64-bit words.
"""

import struct
from dataclasses import dataclass, fields
from enum import IntEnum

from hybridkv.errors import ConfigError, StoreError
from hybridkv.units import format_bytes

MAGIC = b"hybridkv"
FORMAT_VERSION = 1
"""Any change of what lies where, or of what a word means, is a new version."""

GRANULE = 4096
"""Slots are multiples of this many bytes, a page."""
MAX_CHUNK_BYTES = 64 * 2**20
MIN_CHUNKS = 16
MAX_CAPACITY_BYTES = 8 * 2**40
"""Slot numbers are 32 bits wide, of which one value means none."""

HEADER_BYTES = 4096
RECORD_WORDS = 32
KEY_WORD = 7
"""First word of the key in a record; 25 words hold the longest key of the contract, 200 bytes."""
BUCKET_WORDS = 8
ENTRIES_PER_SLOT = 2

ARENA_SHIFT = 2048
"""The first slot's offset in the arena file.

Users' memory mostly begins at or shortly behind the start of a page. Copies between two addresses whose
places in their pages differ by less than 32 bytes take `rep movsb`'s slow path, four times slower on AMD Zen
3 (glibc 2.36); half a page apart they never do.
"""


class Field(IntEnum):
    """The words of a record before its key."""

    GENERATION = 0
    """Even and not 0: published. Odd: free or reserved. 0: never used. It only grows."""
    HASH = 1
    """xxh3_64 of the key."""
    CHECKSUM = 2
    """xxh3_64 of the payload, seeded with the key's hash."""
    NUM_BYTES = 3
    """Of the payload."""
    KEY_CHARS = 4
    OWNER = 5
    """The id of the store that has reserved the slot, else 0."""
    STORED_AT = 6
    """Wall clock at publication in ns since 1970; for people, decides nothing."""


class HeaderWord(IntEnum):
    """The words of the header that change; the geometry lies before them."""

    LAST_OWNER = 16
    """The id given last; ids are never used again."""
    STAMP_BASE = 17
    """Added to the monotonic clock, so that access stamps grow across reboots."""
    CHANGES = 18
    """Raised under the lock whenever a slot becomes free or a chunk changes its size class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a store's files.

    Attributes:
        capacity_bytes: of all slots together, a multiple of ``GRANULE``.
        chunk_bytes: the arena is cut into chunks, each of which belongs to one size class at a time; the last
            one may be shorter. No object is larger.
        num_chunks: of the arena.
        slots_per_chunk: records that a chunk has in the meta file; it uses as many as its slots need.
        num_buckets: of the index, a power of two.
    """

    capacity_bytes: int
    chunk_bytes: int
    num_chunks: int
    slots_per_chunk: int
    num_buckets: int

    @classmethod
    def of(cls, capacity_bytes: int) -> "Geometry":
        """Return the geometry of a capacity, which is rounded down to whole granules.

        Raises:
            ConfigError: the capacity is below one granule or above ``MAX_CAPACITY_BYTES``.
        """
        if not GRANULE <= capacity_bytes <= MAX_CAPACITY_BYTES:
            raise ConfigError(
                f"local store: capacity is {capacity_bytes} bytes; give {format_bytes(GRANULE)} to "
                f"{format_bytes(MAX_CAPACITY_BYTES)}"
            )
        granules = capacity_bytes // GRANULE
        chunk_granules = min(MAX_CHUNK_BYTES // GRANULE, max(1, granules // MIN_CHUNKS))
        num_chunks = -(-granules // chunk_granules)
        entries = ENTRIES_PER_SLOT * num_chunks * chunk_granules
        return cls(
            capacity_bytes=granules * GRANULE,
            chunk_bytes=chunk_granules * GRANULE,
            num_chunks=num_chunks,
            slots_per_chunk=chunk_granules,
            num_buckets=1 << max(4, (entries // BUCKET_WORDS - 1).bit_length()),
        )

    @property
    def num_slots(self) -> int:
        """Records in the meta file, used or not."""
        return self.num_chunks * self.slots_per_chunk

    @property
    def chunks_offset(self) -> int:
        """Where the size class of each chunk lies, one word a chunk, 0 = none."""
        return HEADER_BYTES

    @property
    def index_offset(self) -> int:
        """Where the index's buckets lie."""
        return self.chunks_offset + _pages(8 * self.num_chunks)

    @property
    def stamps_offset(self) -> int:
        """Where the access stamps lie, one word a slot."""
        return self.index_offset + 8 * BUCKET_WORDS * self.num_buckets

    @property
    def records_offset(self) -> int:
        """Where the records lie."""
        return self.stamps_offset + _pages(8 * self.num_slots)

    @property
    def meta_bytes(self) -> int:
        """Size of the meta file; what lies behind ``stamps_offset`` takes space once a chunk is used."""
        return self.records_offset + 8 * RECORD_WORDS * self.num_slots

    @property
    def arena_bytes(self) -> int:
        """Size of the arena file."""
        return self.capacity_bytes + GRANULE

    def num_slots_of(self, chunk: int, slot_bytes: int) -> int:
        """Return how many slots of a size a chunk has."""
        return min(self.chunk_bytes, self.capacity_bytes - chunk * self.chunk_bytes) // slot_bytes

    def to_header(self) -> bytes:
        """Return the first bytes of the meta file."""
        words = [getattr(self, field.name) for field in fields(self)]
        return MAGIC + struct.pack(f"<{1 + len(words)}Q", FORMAT_VERSION, *words)

    @classmethod
    def from_header(cls, header: bytes, where: str) -> "Geometry":
        """Read the first bytes of a meta file.

        Raises:
            StoreError: it is no meta file, one of another version, or its geometry is none.
        """
        names = [field.name for field in fields(cls)]
        form = struct.Struct(f"<{len(MAGIC)}s{1 + len(names)}Q")
        if len(header) < form.size or not header.startswith(MAGIC):
            raise StoreError(f"{where} is no file of a local store; it was left as it is")
        _, version, *words = form.unpack_from(header)
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{where} has format version {version}, this hybridkv reads {FORMAT_VERSION}; it was left "
                f"as it is: open it with the version that made it, or give another directory"
            )
        stated = cls(**dict(zip(names, words, strict=True)))
        if not GRANULE <= stated.capacity_bytes <= MAX_CAPACITY_BYTES or stated != cls.of(
            stated.capacity_bytes
        ):
            raise StoreError(f"{where} has a damaged header; it was left as it is: remove the directory")
        return stated


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // GRANULE) * GRANULE
