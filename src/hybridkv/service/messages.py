"""What crosses between the scheduler side and the worker side, which may live in different processes.

Plain frozen values of integers, texts and bytes, so that any serialiser carries them. Both sides check
``VERSION``: an engine's processes may be started from different installations.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hybridkv.keys import prefix, texts
from hybridkv.transfer.moves import Ended

VERSION = 2


class JobKind(Enum):
    """Which way a job moves bytes."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTransfer:
    """The objects of one spec group that a job moves.

    Attributes:
        spec_group: index of the spec group.
        digests: the objects' block hashes laid end to end; each worker makes its own rank's keys of them.
        blocks: engine block ids as little-endian int64, shape (objects, members, k) in row order; see
            ``BlockIO`` for the skipped ones.
        num_objects: how many objects.
    """

    spec_group: int
    digests: bytes
    blocks: bytes
    num_objects: int

    @classmethod
    def of(cls, spec_group: int, digests: bytes, blocks: NDArray[np.int64]) -> "GroupTransfer":
        """Return the transfer of objects whose blocks are given as an array, shape (objects, members, k)."""
        return cls(
            spec_group=spec_group,
            digests=digests,
            blocks=np.ascontiguousarray(blocks, dtype="<i8").tobytes(),
            num_objects=len(blocks),
        )

    def keys(self, fingerprint: str, rank: int) -> list[str]:
        """Return the objects' keys in a namespace and rank namespace."""
        return texts(prefix(fingerprint, self.spec_group, rank), self.digests, self.num_objects)

    def block_ids(self, num_members: int, k: int) -> NDArray[np.int64]:
        """Return the engine block ids, int64, shape (objects, members, k)."""
        return np.frombuffer(self.blocks, dtype="<i8").reshape(self.num_objects, num_members, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One load or save of one request; every rank carries it out on its own bytes.

    Attributes:
        job_id: never repeats within a scheduler side.
        kind: load or save.
        request_id: for logs and reports; a request may have had other lives under the same id.
        fingerprint: of the namespace that the objects' keys are of.
        groups: what to move.
        ask_first: a save of objects that may well be stored: only what the store does not hold is read.
    """

    job_id: int
    kind: JobKind
    request_id: str
    fingerprint: str
    groups: tuple[GroupTransfer, ...]
    ask_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the worker side is told before a step.

    Attributes:
        version: of these messages.
        jobs: to start, in order.
        cancelled: ids of jobs that must not touch engine blocks any more.
    """

    version: int = VERSION
    jobs: tuple[Job, ...] = ()
    cancelled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker tells after a step.

    Attributes:
        version: of these messages.
        rank: tensor-parallel rank.
        staged: ids of saves whose engine blocks are read and may be given back.
        ended: jobs that ended since the last report; a job ends once on each rank.
    """

    version: int = VERSION
    rank: int
    staged: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()
