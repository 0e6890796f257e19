"""What a ``Mover`` is told and what it tells: moves, ends, settings, metrics."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hybridkv.transfer.guard import GuardMetrics, GuardSettings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupMove:
    """Objects of one spec group that a job moves on this rank.

    Attributes:
        spec_group: index of the spec group.
        object_bytes: payload of one object.
        keys: one an object.
        blocks: int64, shape (objects, members, k), as ``BlockIO`` takes them.
    """

    spec_group: int
    object_bytes: int
    keys: list[str]
    blocks: NDArray[np.int64]


class Outcome(Enum):
    """How a job ended on one rank."""

    DONE = "done"
    """All objects were moved."""
    FAILED = "failed"
    """Not all were; what a load was to fill must not be used."""
    CANCELLED = "cancelled"
    """It was cancelled before all were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended one job.

    Attributes:
        job_id: the job.
        outcome: how it ended.
        marks: per part one byte an object, 1 = stored (of a save), or 1 = asked for and not served (of a
            load).
    """

    job_id: int
    outcome: Outcome
    marks: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSettings:
    """Bounds and patience of a ``Mover``.

    Attributes:
        slot_bytes: bytes of one store call at most; an object above it cannot be moved.
        batch_objects: objects of one store call at most, each one segment of memory; >= 1.
        num_slots: slots for saves, and as many again for loads.
        queued_jobs: jobs that wait at most, of each kind; further ones fail at once.
        put_retries: how often refused objects are put again.
        backoff_s: wait before the first of these; it doubles from one to the next.
        slot_timeout_s: longest wait for a free slot.
        write_bytes_per_s: most bytes that are put on average, so that saves leave the store to loads;
            ``None`` = no limit.
        guard: deadline and breaker of store calls.
    """

    slot_bytes: int = 32 << 20
    batch_objects: int = 1024
    num_slots: int = 8
    queued_jobs: int = 1024
    put_retries: int = 3
    backoff_s: float = 0.03
    slot_timeout_s: float = 10.0
    write_bytes_per_s: int | None = None
    guard: GuardSettings = field(default_factory=GuardSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverMetrics:
    """What a ``Mover`` has under way.

    Attributes:
        jobs: that were started and have not ended.
        queued_saves: of them, saves that nobody has begun to stage.
        queued_loads: of them, loads that nobody has begun.
        slots_held: staging slots in use, also by calls that hang.
        staging_bytes_held: the same in bytes: what is in flight at most.
        calls: store calls since the start.
    """

    jobs: int
    queued_saves: int
    queued_loads: int
    slots_held: int
    staging_bytes_held: int
    calls: GuardMetrics
