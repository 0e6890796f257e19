"""The store contract: what every place that holds objects promises.

A store maps keys to immutable objects. It is batch-first (every call takes many keys and answers for
each key), knows nothing of plans, and moves bytes only inside regions that its user registered.
``hybridkv.testing.stores`` is the executable form of this contract.

What raises and what is a result:

* A call that no store could carry out (closed store, lists of unequal length, a bad key, a segment
  outside every region, an empty object) raises ``StoreError`` before a byte moves.
* What concerns one key (absent, full, wrong size, wrong checksum) is that key's result; the other keys
  of the batch are served.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.stores.regions import Region

MAX_KEY_CHARS = 200
"""Longest key that every store accepts; keys are printable ASCII without spaces."""

Segment = tuple[int, int]
"""One piece of an object in memory: (address, bytes), inside one registered region."""

Segments = Sequence[Segment]
"""One object's bytes, scattered in memory and concatenated in this order."""


class PutResult(Enum):
    """What became of one key of a ``put``."""

    STORED = "stored"
    """The object is in the store, with these bytes."""
    ALREADY = "already"
    """The key was taken, also by an earlier twin of the same batch; the first bytes stay."""
    REFUSED = "refused"
    """No room; the caller may try again later."""
    FAILED = "failed"
    """The store could not do it; nothing is stored under the key by this call."""


class GetResult(Enum):
    """What became of one key of a ``get``. Unless ``OK``, the target's content is undefined."""

    OK = "ok"
    """The target holds the object."""
    ABSENT = "absent"
    """No such object."""
    CORRUPT = "corrupt"
    """The stored object is not what it should be: its size is not the target's (then no byte of the
    target was touched) or its checksum fails. The caller discards the key."""
    FAILED = "failed"
    """The store could not do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutHint:
    """What the planner knows about an object and an eviction policy may use; a store may ignore it.

    Attributes:
        parent: key of the object before this one in its prefix chain, in the same spec group and rank;
            ``None`` for the first.
        prefix: tokens from the start of the prompt to the end of the object.
        spec_group: index of the spec group in its layout.
        kept_boundary: whether a kept boundary ends with this object.
    """

    parent: str | None
    prefix: int
    spec_group: int
    kept_boundary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object as ``list`` shows it; its age since it was stored where the store knows it."""

    key: str
    num_bytes: int
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since the store was opened, except the first three, which are of this moment."""

    objects: int
    used_bytes: int
    capacity_bytes: int | None
    stored_objects: int
    stored_bytes: int
    evicted_objects: int
    evicted_bytes: int
    corrupt_objects: int = 0
    """Payloads that failed their checksum and were discarded by this store."""


@runtime_checkable
class Store(Protocol):
    """A bounded place for immutable objects. All methods may be called from several threads."""

    def register(self, buffer: "Buffer") -> "Region":
        """Make a writable, contiguous buffer usable for segments and keep it alive until ``unregister``.

        Raises:
            StoreError: the buffer is read-only, not contiguous, empty or overlaps a registered one.
        """

    def unregister(self, region: "Region") -> None:
        """Forget a region; the caller has no call in flight that uses it."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tell for each key whether its object is stored. Renews nothing in the eviction order."""

    def put(
        self, keys: Sequence[str], sources: Sequence[Segments], hints: Sequence[PutHint] | None = None
    ) -> list[PutResult]:
        """Copy objects in; when the call returns, the sources may be reused.

        A stored object is readable by others only when it is complete.
        """

    def get(self, keys: Sequence[str], targets: Sequence[Segments]) -> list[GetResult]:
        """Copy objects out. Served keys become the most recently used."""

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects whatever protects them; absent keys are no error.

        A payload that failed its checksum or size must not stay under its key, since ``put`` keeps the
        first bytes.
        """

    def close(self) -> None:
        """Release everything; a second call does nothing, any other call raises ``StoreClosedError``."""


@runtime_checkable
class ListsObjects(Protocol):
    """A store that can enumerate what it holds."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, in no order, renewing nothing."""


@runtime_checkable
class ReportsStats(Protocol):
    """A store that counts."""

    def stats(self) -> StoreStats:
        """Return the counts of this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a store found when it verified itself.

    Attributes:
        objects: that were checked.
        used_bytes: of their payloads.
        reserved_objects: places that puts in flight hold.
        corrupt_objects: whose payload is not what was stored.
        lost_objects: stored, but not to be found under their keys.
        stale_entries: of the index, that lead nowhere: a cost, not an error.
        is_fixed: whether all of this was put right.
    """

    objects: int
    used_bytes: int
    reserved_objects: int
    corrupt_objects: int
    lost_objects: int
    stale_entries: int
    is_fixed: bool

    @property
    def num_errors(self) -> int:
        """Corrupt and lost objects."""
        return self.corrupt_objects + self.lost_objects


@runtime_checkable
class ChecksItself(Protocol):
    """A store that can verify what it holds."""

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every payload, and that every object is found; with ``fix``, discard and repair.

        Others may go on using the store.
        """
