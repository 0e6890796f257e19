"""The scheduler side's jobs on their way: what they hold, who has still to report, how they ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.service.messages import GroupTransfer, Job, JobKind, StepPlan, WorkerReport
from hybridkv.service.tables import Blocks
from hybridkv.transfer.ledger import Ledger
from hybridkv.transfer.moves import Ended, Outcome


@dataclass(slots=True, eq=False)
class Misses:
    """What a request's loads have failed of so far, over all its lives until it is forgotten.

    Attributes:
        keys: that count as absent in its lookups.
        num_loads: failed loads.
    """

    keys: set[str] = field(default_factory=set)
    num_loads: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """One life of a request: from a lookup to its end or its next lookup; others may bear the same id.

    Attributes:
        request_id: names the request.
        num_tokens: tokens that are named by ``blob`` or follow it: N, and more once it has grown.
        prompt: N.
        blob: the block hashes.
        ledger: what is stored of it.
        may_save: whether it is saved at all.
        misses: what its loads have failed of.
        may_load: whether it is looked up at all.
        is_started: whether the engine has allocated its blocks.
        device_prefix: p0.
        hit: the resumed prefix, >= p0.
        junction: leading tokens known to be shared with other prompts; 0 = none.
        planned: tokens up to which saves were planned.
        has_unsaved: whether something from the hit up to there is left to be saved.
        has_unrepaired: whether something below p0 is left to be asked for and saved.
        planned_at: the scheduler side's count of changes when saves were last planned.
    """

    request_id: str
    num_tokens: int
    blob: bytes
    ledger: Ledger
    may_save: bool
    misses: Misses
    may_load: bool = True
    is_started: bool = False
    prompt: int = 0
    device_prefix: int = 0
    hit: int = 0
    junction: int = 0
    planned: int = 0
    has_unsaved: bool = False
    has_unrepaired: bool = False
    planned_at: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.num_tokens

    def resume_at(self, device_prefix: int, hit: int) -> None:
        """Set from where the request computes: the hit, which is the device's prefix where nothing loads."""
        self.device_prefix, self.hit, self.planned = device_prefix, hit, hit
        self.has_unrepaired = device_prefix > 0


@dataclass(slots=True, eq=False)
class Running:
    """A job on its way.

    Attributes:
        job: as it is sent.
        life: whose it is.
        objects: per spec group, int64.
        blocks: engine blocks that it holds.
        marks: per spec group, one bool an object, of all ranks together: a save's objects that each rank has
            stored, a load's objects that some rank has missed.
        unstaged: ranks that may still read the blocks of a save.
        unended: ranks that have still to report the end.
        is_sent: whether the workers were told.
        is_cancelled: whether they were told to leave it.
        is_done: whether every rank that has reported said so.
    """

    job: Job
    life: Life
    objects: list[NDArray[np.int64]]
    blocks: Blocks
    marks: list[NDArray[np.bool_]]
    unstaged: set[int]
    unended: set[int]
    is_sent: bool = False
    is_cancelled: bool = False
    is_done: bool = True

    @property
    def is_load(self) -> bool:
        """Whether the job is a load."""
        return self.job.kind is JobKind.LOAD

    def take(self, rank: int, ended: Ended) -> None:
        """Note how one rank ended; what was cancelled or answers in another form counts as nothing moved."""
        self.unended.discard(rank)
        self.unstaged.discard(rank)
        self.is_done &= ended.outcome is Outcome.DONE
        if self.is_cancelled or [len(said) for said in ended.marks] != [len(mine) for mine in self.marks]:
            self.is_done = False
            self.marks = [np.zeros(len(marks), np.bool_) for marks in self.marks]
            return
        said = [np.frombuffer(of_group, np.uint8) != 0 for of_group in ended.marks]
        self.marks = [
            mine | theirs if self.is_load else mine & theirs
            for mine, theirs in zip(self.marks, said, strict=True)
        ]


class JobBook:
    """All jobs of a scheduler side.

    Args:
        num_ranks: worker sides that report; a job has ended when it has on each of them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._running: dict[int, Running] = {}
        self._holds: dict[tuple[int, int], int] = {}
        self._next_job_id = 1
        self._unsent: list[Running] = []
        self._cancelled: list[int] = []
        self._taken_back: list[Running] = []
        self.num_stale = 0

    def start(
        self,
        kind: JobKind,
        life: Life,
        objects: list[NDArray[np.int64]],
        transfers: Iterable[GroupTransfer],
        blocks: Blocks,
        *,
        fingerprint: str,
        ask_first: bool = False,
    ) -> Blocks:
        """Enter a job; return the blocks that it holds and no other job held before."""
        job = Job(
            job_id=self._next_job_id,
            kind=kind,
            request_id=life.request_id,
            fingerprint=fingerprint,
            groups=tuple(transfers),
            ask_first=ask_first,
        )
        self._next_job_id += 1
        running = Running(
            job=job,
            life=life,
            objects=objects,
            blocks=blocks,
            marks=[np.full(len(chosen), kind is JobKind.SAVE) for chosen in objects],
            unstaged=set(self._ranks),
            unended=set(self._ranks),
        )
        self._running[job.job_id] = running
        self._unsent.append(running)
        fresh = frozenset(blocks - self._holds.keys())
        for block in blocks:
            self._holds[block] = self._holds.get(block, 0) + 1
        return fresh

    def of_request(self, request_id: str) -> list[Running]:
        """Return the jobs of a request, of all its lives, those taken back included."""
        every = [*self._running.values(), *self._taken_back]
        return [running for running in every if running.job.request_id == request_id]

    def cancel_loads(self, request_id: str) -> None:
        """Have the loads of a request touch no block any more."""
        for running in list(self._running.values()):
            if running.is_load and running.job.request_id == request_id:
                self.cancel(running)

    def cancel_all(self) -> None:
        """Have all jobs touch no block any more."""
        for running in list(self._running.values()):
            self.cancel(running)

    def cancel(self, running: Running) -> None:
        """Have a job touch no block any more; one that was not sent ends with the next report."""
        if running.is_sent:
            if not running.is_cancelled:
                self._cancelled.append(running.job.job_id)
            running.is_cancelled = True
            return
        self._unsent.remove(running)
        del self._running[running.job.job_id]
        running.is_done = False
        running.marks = [np.zeros(len(marks), np.bool_) for marks in running.marks]
        running.unstaged.clear()
        running.unended.clear()
        self._taken_back.append(running)

    def loading(self) -> frozenset[str]:
        """Return the requests whose loads are on their way."""
        return frozenset(running.job.request_id for running in self._running.values() if running.is_load)

    def take_step(self) -> StepPlan:
        """Return the jobs that were not sent yet, and those to cancel."""
        plan = StepPlan(jobs=tuple(running.job for running in self._unsent), cancelled=tuple(self._cancelled))
        for running in self._unsent:
            running.is_sent = True
        self._unsent, self._cancelled = [], []
        return plan

    def report(self, report: WorkerReport) -> tuple[list[Running], Blocks]:
        """Take what one rank tells; return the jobs that have ended on all ranks, and blocks held no more."""
        released: set[tuple[int, int]] = set()
        over, self._taken_back = self._taken_back, []
        for running in over:
            released |= self._release(running)
        for job_id in report.staged:
            if (staged := self._running.get(job_id)) is not None:
                staged.unstaged.discard(report.rank)
                released |= self._release(staged)
        for ended in report.ended:
            found = self._running.get(ended.job_id)
            if found is None or report.rank not in found.unended:
                self.num_stale += 1
                continue
            found.take(report.rank, ended)
            released |= self._release(found)
            if not found.unended:
                del self._running[ended.job_id]
                over.append(found)
        return over, frozenset(released)

    @property
    def pinned(self) -> Iterable[tuple[int, int]]:
        """Blocks that jobs hold, each once."""
        return self._holds.keys()

    @property
    def num_pinned(self) -> int:
        """Blocks that jobs hold."""
        return len(self._holds)

    def num_pinned_by_saves(self) -> int:
        """Return how many blocks saves hold: the part of them that the engine's requests may not need."""
        held: set[tuple[int, int]] = set()
        for running in (*self._running.values(), *self._taken_back):
            if not running.is_load:
                held |= running.blocks
        return len(held)

    @property
    def is_idle(self) -> bool:
        """Whether no job is on its way."""
        return not self._running and not self._taken_back

    def _release(self, running: Running) -> set[tuple[int, int]]:
        """Let go of a job's blocks once no rank touches them any more; return those that nobody holds now."""
        touching = running.unended if running.is_load else running.unstaged
        if touching:
            return set()
        blocks, running.blocks = running.blocks, frozenset()
        free = set()
        for block in blocks:
            if self._holds[block] == 1:
                del self._holds[block]
                free.add(block)
            else:
                self._holds[block] -= 1
        return free
