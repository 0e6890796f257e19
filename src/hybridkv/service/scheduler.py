"""The scheduler side: for each request a hit, then load and save jobs; it never touches a payload.

An engine adapter calls, in this order::

    find_hit      a request waits: how many tokens can be resumed from?
    allocated     its blocks exist: the load is planned
    advanced      a step will complete tokens: their save is planned
    take_step     what the worker sides of all ranks shall do now
    report        what a worker side tells; afterwards, which requests are loaded, which blocks are free
    forget        the request finished, was aborted or preempted; it may come again under its id

Block tables are lists of engine block ids, one a cache group, 0 where the engine holds no block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, TransferError
from hybridkv.keys import KeyScheme
from hybridkv.plan.boundaries import Retention, check_retention
from hybridkv.plan.load import plan_load
from hybridkv.plan.save import plan_save
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.messages import VERSION, GroupTransfer, Job, JobKind, StepPlan, WorkerReport
from hybridkv.specs.group import SpecGroup
from hybridkv.transfer.block_io import NULL_BLOCK, SKIP
from hybridkv.transfer.ledger import Ledger

Tables = Sequence[Sequence[int] | NDArray[np.int64]]
"""Engine block ids per cache group."""
Blocks = frozenset[tuple[int, int]]
"""Engine blocks: (cache group, block id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How the scheduler side decides.

    Attributes:
        retention: which boundaries are kept.
        lookup_timeout_s: longest lookup; then the best proven boundary is the hit. ``None`` = no limit.
        least_load_tokens: a hit that adds fewer tokens to the device's prefix is not worth loading.
        least_save_tokens: shorter prompts are not saved.
        pinned_blocks: blocks that jobs may hold at most; further saves are dropped and counted.
    """

    retention: Retention = "all"
    lookup_timeout_s: float | None = 1.0
    least_load_tokens: int = 1
    least_save_tokens: int = 1
    pinned_blocks: int = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """Tells routers of consecutive objects that every rank has stored.

    Attributes:
        spec_group: index of the spec group.
        block_hashes: name the objects, in order, laid end to end: each is the parent of the next.
        parent_hash: names the object before the first one in its prefix chain, stored now or not; empty
            where there is none.
        object_size: tokens of each object.
    """

    spec_group: int
    block_hashes: bytes
    parent_hash: bytes
    object_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a report changed for the engine.

    Attributes:
        loaded: requests whose load is complete.
        load_failed: requests whose load failed; their blocks hold nothing of use, look them up again.
        released: blocks that jobs held and hold no more.
        stored: what saves have stored, once on all ranks.
    """

    loaded: tuple[str, ...] = ()
    load_failed: tuple[str, ...] = ()
    released: Blocks = frozenset()
    stored: tuple[StoredEvent, ...] = ()


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    hit_tokens: int = 0
    loads_failed: int = 0
    saves_dropped: int = 0
    unfilled_blocks: int = 0
    objects_stored: int = 0
    stale_reports: int = 0


@dataclass(slots=True, eq=False)
class _Life:
    """One life of a request: from its first lookup to its end; a later life may bear the same id."""

    request_id: str
    num_tokens: int
    blob: bytes
    ledger: Ledger
    may_load: bool
    may_save: bool
    device_prefix: int = 0
    hit: int = 0
    junction: int = 0
    advanced: int = 0
    absent: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Running:
    """A job on its way: whose it is, what it holds, who has still to report."""

    job: Job
    life: _Life
    objects: list[NDArray[np.int64]]
    blocks: Blocks
    moved: list[NDArray[np.bool_]]
    unstaged: set[int]
    unended: set[int]


class SchedulerSide:
    """Plans loads and saves of the requests of one engine. Used by one thread.

    A job has ended when it has on each of the layout's tensor-parallel ranks.

    Args:
        driver: looks prompts up.
        scheme: names objects; the driver's.
        settings: how to decide.
    """

    def __init__(self, driver: LookupDriver, scheme: KeyScheme, settings: SchedulerSettings) -> None:
        check_retention(settings.retention, scheme.layout)
        self._driver, self._scheme, self._settings = driver, scheme, settings
        self._layout = scheme.layout
        self._lives: dict[str, _Life] = {}
        self._running: dict[int, _Running] = {}
        self._next_job_id = 1
        self._jobs: list[Job] = []
        self._cancelled: list[int] = []
        self.counters = Counters()

    # ---- requests

    def find_hit(
        self,
        request_id: str,
        num_tokens: int,
        blob: bytes,
        *,
        device_prefix: int = 0,
        may_load: bool = True,
        may_save: bool = True,
    ) -> int:
        """Return how many tokens of a waiting request can be resumed from, the device's prefix included.

        Keys that a load of this request has missed count as absent until the request is forgotten.

        Args:
            request_id: names the request until ``forget``.
            num_tokens: N, the prompt's length.
            blob: the prompt's block hashes.
            device_prefix: p0, tokens that the engine holds itself.
            may_load: ``False`` opts the request out of loading.
            may_save: ``False`` opts it out of saving.
        """
        old = self._lives.get(request_id)
        life = _Life(
            request_id=request_id,
            num_tokens=num_tokens,
            blob=blob,
            ledger=Ledger([num_tokens // group.object_size for group in self._layout.spec_groups]),
            may_load=may_load,
            may_save=may_save and num_tokens >= self._settings.least_save_tokens,
            device_prefix=device_prefix,
            hit=device_prefix,
            advanced=device_prefix,
            absent=old.absent if old is not None else set(),
        )
        self._lives[request_id] = life
        if may_load:
            self._look_up(life)
        return life.hit

    def _look_up(self, life: _Life) -> None:
        found = self._driver.lookup(
            life.num_tokens,
            life.blob,
            device_prefix=life.device_prefix,
            timeout_s=self._settings.lookup_timeout_s,
            absent=life.absent,
        ).result
        life.junction = found.full_run if found.full_run > found.hit else 0
        if found.hit - life.device_prefix >= self._settings.least_load_tokens:
            life.hit = life.advanced = found.hit

    def allocated(self, request_id: str, tables: Tables) -> Blocks:
        """Plan the load of a request whose blocks up to its hit are allocated; return the blocks it fills.

        Every block that the engine allocated between the device's prefix and the hit must be filled by the
        load, since the engine will take it for computed.

        Raises:
            TransferError: it would not be; the caller treats the load as failed.
        """
        life = self._lives[request_id]
        if life.hit <= life.device_prefix:
            return frozenset()
        loads = plan_load(self._layout, life.hit, device_prefix=life.device_prefix)
        objects = [np.arange(load.start, load.stop, dtype=np.int64) for load in loads]
        if wrong := self._unfilled(life, loads, tables):
            self.counters.unfilled_blocks += wrong
            raise TransferError(
                f"request {request_id!r}: {wrong} blocks up to token {life.hit} are allocated and not "
                "planned, or planned and not allocated; its load would leave them unfilled"
            )
        self.counters.hit_tokens += life.hit - life.device_prefix
        return self._start(JobKind.LOAD, life, objects, tables).blocks

    def advanced(
        self, request_id: str, num_computed: int, tables: Tables, *, states: Sequence[int] | None = None
    ) -> Blocks:
        """Plan the save of what the coming step completes; return the blocks that must be held for it.

        Args:
            request_id: of a request that computes.
            num_computed: tokens of the prompt that are computed after the step; more than N count as N.
            tables: as they are during the step.
            states: numbers of tokens after which the tables hold recurrent states; ``None`` = only what is
                computed after the step.
        """
        life = self._lives[request_id]
        stop = min(num_computed, life.num_tokens)
        if not life.may_save or stop <= life.advanced:
            return frozenset()
        plans = plan_save(
            self._layout,
            retention=self._settings.retention,
            start=life.hit,
            stop=stop,
            num_tokens=life.num_tokens,
            junction=life.junction,
        )
        life.advanced = stop
        wanted = [
            self._saveable(group, plan.indices(), tables, [stop] if states is None else states)
            for group, plan in zip(self._layout.spec_groups, plans, strict=True)
        ]
        needed = sum(
            len(objects) * len(group.cache_groups) * group.blocks_per_object
            for group, objects in zip(self._layout.spec_groups, wanted, strict=True)
        )
        if needed + self.num_pinned > self._settings.pinned_blocks:
            self.counters.saves_dropped += 1
            return frozenset()
        claimed = [life.ledger.claim(idx, objects) for idx, objects in enumerate(wanted)]
        if not any(map(len, claimed)):
            return frozenset()
        return self._start(JobKind.SAVE, life, claimed, tables).blocks

    def forget(self, request_id: str) -> Blocks:
        """End a request's life: finished, aborted or preempted; return the blocks that jobs still hold.

        Loads are cancelled; saves go on from what they hold. The engine must not use a returned block again
        before ``report`` has released it. What the request had missed is forgotten with it.
        """
        life = self._lives.pop(request_id, None)
        held: set[tuple[int, int]] = set()
        for running in [one for one in self._running.values() if one.life is life]:
            if running.job.kind is JobKind.LOAD:
                self._cancel(running)
            held |= running.blocks
        return frozenset(held)

    def reset(self) -> None:
        """Forget all requests and cancel all jobs; the jobs' reports still release blocks."""
        self._lives.clear()
        for running in list(self._running.values()):
            self._cancel(running)

    # ---- steps

    def take_step(self) -> StepPlan:
        """Return what the worker sides shall do now: each job goes out once, to every rank."""
        plan = StepPlan(jobs=tuple(self._jobs), cancelled=tuple(self._cancelled))
        self._jobs, self._cancelled = [], []
        return plan

    def report(self, report: WorkerReport) -> Progress:
        """Take what one rank tells.

        Raises:
            ConfigError: the message is of another version.
        """
        if report.version != VERSION:
            raise ConfigError(f"a worker speaks version {report.version} of the messages, not {VERSION}")
        released: set[tuple[int, int]] = set()
        stored: list[StoredEvent] = []
        for job_id in report.staged:
            if (running := self._running.get(job_id)) is not None:
                running.unstaged.discard(report.rank)
                released |= self._release(running)
        loaded: list[str] = []
        failed: list[str] = []
        for ended in report.ended:
            running = self._running.get(ended.job_id)
            if running is None or report.rank not in running.unended:
                self.counters.stale_reports += 1
                continue
            running.unended.discard(report.rank)
            running.unstaged.discard(report.rank)
            running.moved = [
                moved & np.frombuffer(said, np.bool_)
                for moved, said in zip(running.moved, ended.moved, strict=True)
            ]
            released |= self._release(running)
            if not running.unended:
                del self._running[ended.job_id]
                if running.job.kind is JobKind.SAVE:
                    stored += self._settle_save(running)
                else:
                    self._settle_load(running, loaded, failed)
        return Progress(
            loaded=tuple(loaded),
            load_failed=tuple(failed),
            released=frozenset(released),
            stored=tuple(stored),
        )

    @property
    def num_pinned(self) -> int:
        """Blocks that jobs hold."""
        return sum(len(running.blocks) for running in self._running.values())

    @property
    def is_idle(self) -> bool:
        """Whether no job is on its way."""
        return not self._running

    def watermark(self, request_id: str) -> tuple[int, ...]:
        """Return per spec group how many leading objects of a request are stored on every rank."""
        ledger = self._lives[request_id].ledger
        return tuple(ledger.watermark(group.index) for group in self._layout.spec_groups)

    # ---- inside

    def _saveable(
        self, group: SpecGroup, objects: NDArray[np.int64], tables: Tables, states: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the objects that the engine's blocks hold now: no null block, no unwritten state."""
        if group.spec.written_only_at_step_end:
            objects = objects[np.isin((objects + 1) * group.object_size, states)]
        is_held = (self._block_ids(group, objects, tables) != NULL_BLOCK).all(axis=(1, 2))
        saveable: NDArray[np.int64] = objects[is_held]
        return saveable

    def _block_ids(self, group: SpecGroup, objects: NDArray[np.int64], tables: Tables) -> NDArray[np.int64]:
        """Return engine block ids, shape (objects, members, k); null where a table is too short."""
        k = group.blocks_per_object
        places = objects[:, None] * k + np.arange(k)
        ids = np.full((len(objects), len(group.cache_groups), k), NULL_BLOCK, dtype=np.int64)
        for member, cache_group in enumerate(group.cache_groups):
            table = np.asarray(tables[cache_group], dtype=np.int64)
            known = places < len(table)
            ids[:, member][known] = table[places[known]]
        return ids

    def _start(
        self, kind: JobKind, life: _Life, objects: list[NDArray[np.int64]], tables: Tables
    ) -> _Running:
        transfers, blocks = [], set[tuple[int, int]]()
        for group, chosen in zip(self._layout.spec_groups, objects, strict=True):
            ids = self._block_ids(group, chosen, tables)
            if kind is JobKind.LOAD:
                ids = self._for_load(group, chosen, ids, life)
            for member, cache_group in enumerate(group.cache_groups):
                blocks |= {
                    (cache_group, block) for block in ids[:, member].ravel().tolist() if block > NULL_BLOCK
                }
            digests = self._scheme.digests(group.index, chosen, life.blob)
            transfers.append(GroupTransfer.of(group.index, digests, ids))
        job = Job(job_id=self._next_job_id, kind=kind, request_id=life.request_id, groups=tuple(transfers))
        self._next_job_id += 1
        ranks = range(self._layout.tp)
        running = _Running(
            job=job,
            life=life,
            objects=objects,
            blocks=frozenset(blocks),
            moved=[np.ones(len(chosen), np.bool_) for chosen in objects],
            unstaged=set(ranks),
            unended=set(ranks),
        )
        self._running[job.job_id] = running
        self._jobs.append(job)
        return running

    def _for_load(
        self, group: SpecGroup, objects: NDArray[np.int64], ids: NDArray[np.int64], life: _Life
    ) -> NDArray[np.int64]:
        """Return the ids with the device's own blocks skipped: other requests share them."""
        k = group.blocks_per_object
        places = objects[:, None] * k + np.arange(k)
        on_device = (places + 1) * group.spec.block_size <= life.device_prefix
        loaded: NDArray[np.int64] = np.where(on_device[:, None, :] | (ids == NULL_BLOCK), SKIP, ids)
        return loaded

    def _unfilled(self, life: _Life, loads: Sequence[range], tables: Tables) -> int:
        """Return how many blocks the load and the engine's allocation do not agree on."""
        wrong = 0
        for group, load in zip(self._layout.spec_groups, loads, strict=True):
            size, k = group.spec.block_size, group.blocks_per_object
            first, stop = -(-life.device_prefix // size), life.hit // size
            for cache_group in group.cache_groups:
                table = np.asarray(tables[cache_group], dtype=np.int64)[:stop]
                held = np.zeros(stop, np.bool_)
                held[: len(table)] = table != NULL_BLOCK
                filled = np.zeros(stop, np.bool_)
                filled[load.start * k : load.stop * k] = True
                wrong += int(np.count_nonzero((held != filled)[first:]))
        return wrong

    def _cancel(self, running: _Running) -> None:
        """Have a job touch no block any more; one that was not sent yet is simply taken back."""
        job = running.job
        if job in self._jobs:
            self._jobs.remove(job)
            del self._running[job.job_id]
            running.blocks = frozenset()
        else:
            self._cancelled.append(job.job_id)

    def _release(self, running: _Running) -> Blocks:
        """Let go of a job's blocks once no rank touches them any more."""
        waiting = running.unstaged if running.job.kind is JobKind.SAVE else running.unended
        if waiting:
            return frozenset()
        blocks, running.blocks = running.blocks, frozenset()
        return blocks

    def _settle_save(self, running: _Running) -> Iterator[StoredEvent]:
        """Take a save's end on all ranks into the ledger of its life; yield what was stored."""
        life = running.life
        for group, objects, moved in zip(
            self._layout.spec_groups, running.objects, running.moved, strict=True
        ):
            life.ledger.settle(group.index, objects, moved)
            stored = objects[moved]
            self.counters.objects_stored += len(stored)
            for run in np.split(stored, np.flatnonzero(np.diff(stored) != 1) + 1) if len(stored) else ():
                parent = run[:1][run[:1] > 0] - 1
                yield StoredEvent(
                    spec_group=group.index,
                    block_hashes=self._scheme.digests(group.index, run, life.blob),
                    parent_hash=self._scheme.digests(group.index, parent, life.blob),
                    object_size=group.object_size,
                )

    def _settle_load(self, running: _Running, loaded: list[str], failed: list[str]) -> None:
        """Tell how a load ended on all ranks, unless the life that it was for has ended before."""
        life = running.life
        is_whole = all(moved.all() for moved in running.moved)
        self.counters.loads_failed += not is_whole
        if self._lives.get(life.request_id) is not life:
            return
        if is_whole:
            loaded.append(life.request_id)
            return
        failed.append(life.request_id)
        for idx, (objects, moved) in enumerate(zip(running.objects, running.moved, strict=True)):
            life.absent.update(self._scheme.keys(idx, 0, objects[~moved], life.blob))
