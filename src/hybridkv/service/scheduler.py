"""The scheduler side: for each request a hit, then load and save jobs; it never touches a payload.

An engine adapter calls, in this order::

    find_hit      a request waits: how many tokens can be resumed from? `ask` is the same without waiting
    allocated     its blocks exist: the load is planned; `started` where nothing is loaded
    wants_save    whether `advanced` may plan something
    advanced      a step will complete tokens: their save is planned, and repairs below the device's prefix
    take_step     what the worker sides of all ranks shall do now
    grown         output has followed the prompt and is to be saved, too; `finished` saves its end
    report        what a worker side tells; afterwards, which requests are loaded, which blocks are free
    forget        the request finished, was aborted or preempted; it may come again under its id

Block tables are lists of engine block ids, one a cache group, 0 where the engine holds no block.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import ConfigError, TransferError
from hybridkv.keys import KeyScheme
from hybridkv.plan.load import plan_load
from hybridkv.service.hits import Blob, Hits
from hybridkv.service.jobs import JobBook, Life, Running
from hybridkv.service.known import KnownObjects
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.messages import VERSION, GroupTransfer, JobKind, StepPlan, WorkerReport
from hybridkv.service.progress import Counters, Progress, StoredEvent
from hybridkv.service.settings import SchedulerSettings
from hybridkv.service.tables import (
    Blocks,
    Tables,
    block_ids,
    ids_to_load,
    leading,
    named,
    num_unfilled,
)
from hybridkv.service.wanted import objects_to_save


class SchedulerSide:
    """Plans loads and saves of the requests of one engine. Used by one thread.

    A job has ended when it has on each of the layout's tensor-parallel ranks.

    Args:
        driver: looks prompts up.
        scheme: names objects; the driver's.
        settings: how to decide.
        clock: tells when ``known_s`` has passed.

    Raises:
        ConfigError: a setting is out of range or does not fit the layout.
    """

    def __init__(
        self,
        driver: LookupDriver,
        scheme: KeyScheme,
        settings: SchedulerSettings,
        *,
        clock: Clock | None = None,
    ) -> None:
        settings.check(scheme.layout)
        clock = clock or MonotonicClock()
        self._driver, self._scheme, self._settings = driver, scheme, settings
        self._layout = scheme.layout
        self._jobs = JobBook(self._layout.tp)
        self._known = KnownObjects(
            scheme.digest_bytes,
            num_groups=len(self._layout.spec_groups),
            capacity=settings.known_objects,
            age_s=settings.known_s,
            clock=clock,
        )
        self._num_changes = 0  # reports after which what was left may be saved
        self.counters = Counters()
        self._hits = Hits(driver, self._layout, settings, clock=clock, counters=self.counters)
        self._lives = self._hits.lives

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

        Keys that a load of this request has missed count as absent until the request is forgotten. A load of
        it that is still on its way is cancelled: what it would fill is not this life's.

        Args:
            request_id: names the request until ``forget``.
            num_tokens: N, the prompt's length.
            blob: the prompt's block hashes.
            device_prefix: p0, tokens that the engine holds itself.
            may_load: ``False`` opts the request out of loading.
            may_save: ``False`` opts it out of saving.
        """
        self._jobs.cancel_loads(request_id)
        life = self._hits.begin(request_id, num_tokens, blob, device_prefix=device_prefix, may_save=may_save)
        life.may_load = may_load
        self._hits.look_up(life)
        return life.hit

    def ask(
        self,
        request_id: str,
        num_tokens: int,
        blob: Blob,
        *,
        device_prefix: int = 0,
        may_load: bool = True,
        may_save: bool = True,
    ) -> int | None:
        """Return what ``find_hit`` would, but do not wait: ``None`` until there is an answer.

        To be called again, with the device's prefix as it is then, until the request starts or is forgotten.
        ``blob`` makes the prompt's block hashes; only the first of these calls needs them.
        """
        if not self._hits.is_waiting(request_id, num_tokens):
            self._jobs.cancel_loads(request_id)
            life = self._hits.begin(
                request_id, num_tokens, blob(), device_prefix=device_prefix, may_save=may_save
            )
            life.may_load = may_load
        life = self._lives[request_id]
        return life.hit if self._hits.ask(life, device_prefix) else None

    def started(self, request_id: str) -> None:
        """Note that the engine has allocated a request's blocks and loads nothing for it from here."""
        life = self._lives.get(request_id)
        if life is not None and not life.is_started:
            life.is_started = True
            life.resume_at(life.device_prefix, life.device_prefix)

    def allocated(self, request_id: str, tables: Tables, *, num_loaded: int | None = None) -> Blocks:
        """Plan the load of a request whose blocks up to its hit are allocated; return the blocks to hold.

        Every block that the engine allocated between the device's prefix and the hit must be filled by the
        load, since the engine will take it for computed.

        Args:
            request_id: of a request whose hit lies above the device's prefix.
            tables: with the blocks up to the hit.
            num_loaded: tokens that the engine will take for loaded; ``None`` = as many as were found.

        Raises:
            TransferError: it would not be; the caller treats the load as failed.
        """
        life = self._lives[request_id]
        life.is_started = True
        if num_loaded not in (None, life.hit - life.device_prefix):
            life.resume_at(life.device_prefix, life.device_prefix)
            raise TransferError(f"request {request_id!r}: the engine takes {num_loaded} tokens for loaded")
        if life.hit <= life.device_prefix:
            return frozenset()
        loads = plan_load(self._layout, life.hit, device_prefix=life.device_prefix)
        objects = [np.arange(load.start, load.stop, dtype=np.int64) for load in loads]
        prefixes = {"device_prefix": life.device_prefix, "hit": life.hit}
        if wrong := num_unfilled(self._layout, loads, tables, **prefixes):
            self.counters.unfilled_blocks += wrong
            self._note_failed_load(life, objects)
            raise TransferError(
                f"request {request_id!r}: {wrong} blocks up to token {life.hit} are allocated and not "
                "planned, or planned and not allocated; its load would leave them unfilled"
            )
        self.counters.hit_tokens += life.hit - life.device_prefix
        self.counters.loads += 1
        ids = [
            ids_to_load(group, chosen, tables, life.device_prefix)
            for group, chosen in zip(self._layout.spec_groups, objects, strict=True)
        ]
        return self._start(JobKind.LOAD, life, objects, ids)

    def advanced(
        self, request_id: str, num_computed: int, tables: Tables, *, states: Sequence[int] | None = None
    ) -> Blocks:
        """Plan the save of what the coming step completes; return the blocks to hold for it.

        With it goes a repair: the workers ask for the objects below the device's prefix that this process
        has not seen stored lately, and save the absent ones. What does not fit ``pinned_blocks`` or was not
        stored is planned again with later steps, as long as its blocks and states are there.

        A block that another job holds already is not returned again; ``report`` releases it once, when no
        job holds it any more.

        Args:
            request_id: of a request that computes.
            num_computed: tokens that are computed after the step; what no block hash names does not count.
            tables: as they are during the step.
            states: numbers of tokens after which the tables hold recurrent states; ``None`` = only the state
                after ``num_computed``. Below the device's prefix none is taken to be held.
        """
        life = self._lives[request_id]
        stop = min(num_computed, life.num_tokens)
        if not life.may_save or not (stop > life.planned or self._has_left(life)):
            return frozenset()
        life.planned, life.planned_at = max(stop, life.planned), self._num_changes
        computed_states = [num_computed] if states is None else states
        wanted = self._objects_to_save(life, range(life.hit, max(stop, life.hit)), tables, computed_states)
        held, life.has_unsaved = self._save(life, wanted, tables)
        if life.has_unrepaired:
            lost = [
                objects[self._known.unknown(idx, self._scheme.digests(idx, objects, life.blob))]
                for idx, objects in enumerate(
                    self._objects_to_save(life, range(life.device_prefix), tables, ())
                )
            ]
            asked, life.has_unrepaired = self._save(life, lost, tables, ask_first=True)
            held |= asked
        return held

    def wants_save(self, request_id: str) -> bool:
        """Return whether ``advanced`` may plan something; where not, an adapter need not make the tables."""
        life = self._lives.get(request_id)
        return life is not None and life.may_save and (life.planned < life.num_tokens or self._has_left(life))

    def grown(self, request_id: str, num_tokens: int, blob: Blob) -> None:
        """Note that output has followed the prompt and is to be saved like it.

        Args:
            request_id: of a request that computes.
            num_tokens: of prompt and output that block hashes name.
            blob: makes the block hashes of both; called where there are more than before.
        """
        life = self._lives.get(request_id)
        if life is not None and life.may_save and num_tokens > life.num_tokens:
            life.num_tokens, life.blob = num_tokens, blob()
            life.ledger.grow([num_tokens // group.object_size for group in self._layout.spec_groups])

    def finished(self, request_id: str, num_computed: int, tables: Tables) -> Blocks:
        """Plan the save of a request's last candidate while its windows live, then forget it.

        Returns:
            The blocks to hold for it; as with ``advanced``.
        """
        held: Blocks = frozenset()
        life = self._lives.get(request_id)
        if life is not None and life.may_save:
            tokens = range(life.hit, max(min(num_computed, life.num_tokens), life.hit))
            wanted = self._objects_to_save(life, tokens, tables, (), is_end=True)
            held, _ = self._save(life, wanted, tables)
        self.forget(request_id)
        return held

    def forget(self, request_id: str) -> Blocks:
        """End a request's life: finished, aborted or preempted; return the blocks that jobs still hold.

        Loads are cancelled; saves go on from what they hold. The engine must not use a returned block again
        before ``report`` has released it. What the request had missed is forgotten with it.
        """
        self._hits.forget(request_id)
        self._jobs.cancel_loads(request_id)
        return frozenset().union(*(running.blocks for running in self._jobs.of_request(request_id)))

    def reset(self, scheme: KeyScheme | None = None) -> frozenset[str]:
        """Cancel all jobs and save nothing more of the present requests, as after a change of weights.

        Cancelled loads are reported as failed even where they had ended, cancelled saves as nothing stored,
        and all jobs still release their blocks through ``report``.

        Args:
            scheme: names objects from now on, in the same layout; ``None`` = as before.

        Returns:
            The requests whose loads were cancelled: one that a worker had ended has filled its blocks with
            what is void now.
        """
        for life in self._lives.values():
            life.may_save, life.is_started = False, True  # who still waits is asked for anew
        self._hits.drop_answers()
        self._known.clear()
        loading = self._jobs.loading()
        self._jobs.cancel_all()
        if scheme is not None:
            self._scheme = scheme
            self._driver.use(scheme)
        return loading

    # ---- steps

    def take_step(self) -> StepPlan:
        """Return what the worker sides shall do now: each job goes out once, to every rank."""
        return self._jobs.take_step()

    def report(self, report: WorkerReport) -> Progress:
        """Take what one rank tells.

        Raises:
            ConfigError: the message is of another version.
        """
        if report.version != VERSION:
            raise ConfigError(f"a worker speaks version {report.version} of the messages, not {VERSION}")
        over, released = self._jobs.report(report)
        self._num_changes += bool(over or released)
        stored: list[StoredEvent] = []
        loaded: list[str] = []
        failed: list[str] = []
        for running in over:
            if running.is_load:
                self._settle_load(running, loaded, failed)
            else:
                stored += self._settle_save(running)
        return Progress(
            loaded=tuple(loaded), load_failed=tuple(failed), released=released, stored=tuple(stored)
        )

    @property
    def num_pinned(self) -> int:
        """Blocks that jobs hold."""
        return self._jobs.num_pinned

    @property
    def pinned(self) -> Iterable[tuple[int, int]]:
        """The blocks that jobs hold, each once."""
        return self._jobs.pinned

    @property
    def num_pinned_by_saves(self) -> int:
        """Blocks that saves hold; never more than ``pinned_blocks``."""
        return self._jobs.num_pinned_by_saves()

    @property
    def is_idle(self) -> bool:
        """Whether no job is on its way."""
        return self._jobs.is_idle

    @property
    def num_stale_reports(self) -> int:
        """Reports of jobs that were over already."""
        return self._jobs.num_stale

    def watermark(self, request_id: str) -> tuple[int, ...]:
        """Return per spec group how many leading objects of a request are stored on every rank."""
        ledger = self._lives[request_id].ledger
        return tuple(ledger.watermark(group.index) for group in self._layout.spec_groups)

    # ---- inside

    def _objects_to_save(
        self, life: Life, tokens: range, tables: Tables, states: Sequence[int], *, is_end: bool = False
    ) -> list[NDArray[np.int64]]:
        retention = self._settings.retention
        return objects_to_save(
            self._layout, retention, life, tokens=tokens, tables=tables, states=states, is_end=is_end
        )

    def _has_left(self, life: Life) -> bool:
        """Return whether something was left to later steps and a report has made a difference since."""
        return (life.has_unsaved or life.has_unrepaired) and life.planned_at != self._num_changes

    def _save(
        self, life: Life, wanted: list[NDArray[np.int64]], tables: Tables, *, ask_first: bool = False
    ) -> tuple[Blocks, bool]:
        """Start a save of what is unsaved and fits the pin budget; return its blocks, and if more is left."""
        unsaved = [life.ledger.unsaved(idx, objects) for idx, objects in enumerate(wanted)]
        room = self._settings.pinned_blocks - self.num_pinned
        # What is asked for first is mostly stored: it must not keep a step's own save from its blocks.
        chosen = leading(self._layout, unsaved, room // 2 if ask_first else room)
        is_left = sum(map(len, chosen)) < sum(map(len, unsaved))
        self.counters.saves_cut += is_left
        if not any(map(len, chosen)):
            return frozenset(), is_left
        for idx, objects in enumerate(chosen):
            life.ledger.claim(idx, objects)
        ids = [
            block_ids(group, objects, tables)
            for group, objects in zip(self._layout.spec_groups, chosen, strict=True)
        ]
        return self._start(JobKind.SAVE, life, chosen, ids, ask_first=ask_first), is_left

    def _start(
        self,
        kind: JobKind,
        life: Life,
        objects: list[NDArray[np.int64]],
        ids: list[NDArray[np.int64]],
        *,
        ask_first: bool = False,
    ) -> Blocks:
        transfers, blocks = [], set[tuple[int, int]]()
        for group, chosen, of_group in zip(self._layout.spec_groups, objects, ids, strict=True):
            digests = self._scheme.digests(group.index, chosen, life.blob)
            transfers.append(GroupTransfer.of(group.index, digests, of_group))
            blocks |= named(group, of_group)
        return self._jobs.start(
            kind,
            life,
            objects,
            transfers,
            frozenset(blocks),
            fingerprint=self._scheme.manifest.fingerprint,
            ask_first=ask_first,
        )

    def _note_failed_load(self, life: Life, objects: Sequence[NDArray[np.int64]]) -> None:
        """Have the request's next lookup take objects for absent, so that no failed load repeats for ever."""
        life.misses.num_loads += 1
        for idx, chosen in enumerate(objects):
            life.misses.keys.update(self._scheme.keys(idx, 0, chosen, life.blob))
            self._known.forget(idx, self._scheme.digests(idx, chosen, life.blob))

    def _settle_save(self, running: Running) -> Iterator[StoredEvent]:
        """Take a save's end on all ranks into the ledger of its life; yield what was stored."""
        life = running.life
        for group, objects, marks in zip(
            self._layout.spec_groups, running.objects, running.marks, strict=True
        ):
            life.ledger.settle(group.index, objects, marks)
            if len(life.ledger.unsaved(group.index, objects)):
                life.has_unrepaired |= running.job.ask_first
                life.has_unsaved |= not running.job.ask_first
            stored = objects[marks]
            self._known.note(group.index, self._scheme.digests(group.index, stored, life.blob))
            self.counters.objects_stored += len(stored)
            for run in np.split(stored, np.flatnonzero(np.diff(stored) != 1) + 1) if len(stored) else ():
                parent = run[:1][run[:1] > 0] - 1
                yield StoredEvent(
                    spec_group=group.index,
                    block_hashes=self._scheme.digests(group.index, run, life.blob),
                    parent_hash=self._scheme.digests(group.index, parent, life.blob),
                    object_size=group.object_size,
                )

    def _settle_load(self, running: Running, loaded: list[str], failed: list[str]) -> None:
        """Tell how a load ended on all ranks, unless the life that it was for has ended before."""
        life = running.life
        self.counters.loads_failed += not running.is_done
        if self._lives.get(life.request_id) is not life:
            return
        if running.is_done:
            loaded.append(life.request_id)
            for idx, objects in enumerate(running.objects):
                life.ledger.settle(idx, objects, np.ones(len(objects), np.bool_))
                self._known.note(idx, self._scheme.digests(idx, objects, life.blob))
            return
        failed.append(life.request_id)
        missed = [objects[marks] for objects, marks in zip(running.objects, running.marks, strict=True)]
        self._note_failed_load(life, missed if any(map(len, missed)) else running.objects)
