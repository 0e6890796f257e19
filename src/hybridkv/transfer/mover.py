"""Moves jobs between engine blocks and a store: threads, bounded queues, staging, retries.

::

    save   engine blocks --gather--> slot --put--> store        staged when the last gather is done,
                                                                ended when the last put is
    load   engine blocks <-scatter-- slot <--get-- store        ended when the last scatter is done

After ``cancel`` returns, the job touches no engine block any more. Every job ends exactly once.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, Full, Queue, SimpleQueue
from threading import Thread

from hybridkv.clock import Clock, MonotonicClock
from hybridkv.errors import ConfigError, TransferError
from hybridkv.stores.base import GetResult, PutResult, Segments, Store
from hybridkv.transfer.block_io import BlockIO
from hybridkv.transfer.guard import Guard
from hybridkv.transfer.moves import Ended, GroupMove, MoverMetrics, MoverSettings, Outcome
from hybridkv.transfer.staging import Slot, StagingPool

_log = logging.getLogger(__name__)


class _Job:
    """A job on its way."""

    def __init__(self, job_id: int, parts: tuple[GroupMove, ...], *, ask_first: bool = False) -> None:
        self.job_id, self.parts, self.ask_first = job_id, parts, ask_first
        self.marks = [bytearray(len(part.keys)) for part in parts]
        self.touching = threading.Lock()
        self.cancelled = False
        self.batches_open = 1  # the stager's own share, so that no put ends the job before all are staged


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A batch of a save that lies in a slot."""

    job: _Job
    part: int
    objects: list[int]
    slot: Slot


class Mover:
    """Carries out the jobs of one rank.

    Args:
        store: where objects are; owned by the caller.
        block_io: reads and writes engine blocks.
        settings: bounds and patience.
        clock: for back-off and breaker.
    """

    def __init__(
        self, store: Store, block_io: BlockIO, settings: MoverSettings, *, clock: Clock | None = None
    ) -> None:
        self._store, self._io, self._settings = store, block_io, settings
        self._clock = MonotonicClock() if clock is None else clock
        self._guard = Guard(settings.guard, num_threads=4, clock=self._clock)
        slots = {"slot_bytes": settings.slot_bytes, "num_slots": settings.num_slots}
        self._save_slots = StagingPool(store, **slots)
        self._load_slots = StagingPool(store, **slots)
        # Saves that ask first wait for the store while they hold blocks; the others must not wait with them.
        self._saves: Queue[_Job | None] = Queue(settings.queued_jobs)
        self._asking_saves: Queue[_Job | None] = Queue(settings.queued_jobs)
        self._loads: Queue[_Job | None] = Queue(settings.queued_jobs)
        self._puts: Queue[_Staged | None] = Queue(settings.num_slots + 1)
        self._staged: SimpleQueue[int] = SimpleQueue()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._next_put_s = 0.0
        self._threads = [
            Thread(target=target, name=f"hybridkv-{name}", daemon=True)
            for name, target in (
                ("stage", partial(self._run_saves, self._saves)),
                ("ask", partial(self._run_saves, self._asking_saves)),
                ("put", self._run_puts),
                ("load", self._run_loads),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- called by the worker side

    def save(self, job_id: int, parts: tuple[GroupMove, ...], *, ask_first: bool = False) -> None:
        """Start a save; its blocks stay as they are until it is staged, ended or cancelled.

        Args:
            job_id: never repeats.
            parts: what to save.
            ask_first: ask the store, and read only the blocks of what it does not hold.

        Raises:
            ConfigError: a job of this id is under way.
        """
        saves = self._asking_saves if ask_first else self._saves
        self._start(_Job(job_id, parts, ask_first=ask_first), saves)

    def load(self, job_id: int, parts: tuple[GroupMove, ...]) -> None:
        """Start a load into blocks that nobody else uses until it has ended or was cancelled.

        Raises:
            ConfigError: a job of this id is under way.
        """
        self._start(_Job(job_id, parts), self._loads)

    def cancel(self, job_id: int) -> None:
        """Make a job touch no engine block from now on; an unknown or ended job is no error."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            with job.touching:
                job.cancelled = True

    def poll(self) -> tuple[list[int], list[Ended]]:
        """Return the saves that were staged and the jobs that ended since the last call."""
        return list(_drained(self._staged)), list(_drained(self._ended))

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left; return whether that came in time."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what waits, let what runs end, and stop; a second call does nothing.

        Waits ``timeout_s`` for the jobs and as long for each thread. A store call that hangs is left behind
        with its slot; its buffer then stays registered.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._jobs)
        for job_id in jobs:
            self.cancel(job_id)
        for queue in (self._saves, self._asking_saves, self._loads):
            for job in _drained(queue):
                self._end(job, Outcome.CANCELLED)
            queue.put(None)
        self.drain(timeout_s)
        self._puts.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._guard.close()
        for pool in (self._save_slots, self._load_slots):
            if pool.num_free == self._settings.num_slots:
                pool.close()

    def metrics(self) -> MoverMetrics:
        """Return what is under way now, and the store calls since the start."""
        free = self._save_slots.num_free + self._load_slots.num_free
        held = 2 * self._settings.num_slots - free
        with self._lock:
            jobs = len(self._jobs)
        return MoverMetrics(
            jobs=jobs,
            queued_saves=self._saves.qsize() + self._asking_saves.qsize(),
            queued_loads=self._loads.qsize(),
            slots_held=held,
            staging_bytes_held=held * self._settings.slot_bytes,
            calls=self._guard.metrics(),
        )

    # ---- the threads

    def _start(self, job: _Job, queue: "Queue[_Job | None]") -> None:
        with self._lock:
            if job.job_id in self._jobs:
                raise ConfigError(f"job {job.job_id} was started before; ids never repeat")
            refused = self._closed
            self._jobs[job.job_id] = job
        try:
            if not refused:
                queue.put_nowait(job)
        except Full:
            refused = True
        if refused:
            self._end(job, Outcome.FAILED)

    def _run_saves(self, saves: "Queue[_Job | None]") -> None:
        for job in _taken(saves):
            for part_idx in range(len(job.parts)):
                try:
                    if not self._stage(job, part_idx):
                        break
                except BaseException:  # noqa: BLE001 - whatever it is, the part fails and the thread lives on
                    _log.exception("staging part %d of save %d failed", part_idx, job.job_id)
            # Staged or not, from here on nothing of this job reads an engine block.
            self._staged.put(job.job_id)
            self._batch_done(job)

    def _stage(self, job: _Job, part_idx: int) -> bool:
        """Copy a part into slots and hand them to the putting thread; return whether to go on."""
        part = job.parts[part_idx]
        for start, stop in self._batches(part):
            objects = self._to_put(job, part_idx, range(start, stop))
            if not objects:
                continue
            # While the store is spared, staging would only copy for nothing.
            is_spared = self._guard.metrics().is_open
            slot = None if is_spared else self._save_slots.acquire(self._settings.slot_timeout_s)
            if slot is None:
                return False
            is_staged = False
            try:
                gather = partial(self._io.gather, part.spec_group, part.blocks[objects], slot.memory)
                is_staged = _touch(job, gather)
            finally:
                if not is_staged:
                    self._save_slots.release(slot)
            if not is_staged:
                return False
            with self._lock:
                job.batches_open += 1
            self._puts.put(_Staged(job, part_idx, objects, slot))
        return True

    def _to_put(self, job: _Job, part_idx: int, objects: range) -> list[int]:
        """Return the objects to put: all, or, where the job asks first, what the store says it lacks."""
        if not job.ask_first:
            return list(objects)
        if job.cancelled:
            return []
        keys = [job.parts[part_idx].keys[idx] for idx in objects]
        answers = self._guard.call(partial(self._store.contains, keys), lambda: None)
        if answers is None:
            return []
        _check_answers(keys, answers)
        job.marks[part_idx][objects.start : objects.stop] = bytes(map(bool, answers))
        return [idx for idx, is_stored in zip(objects, answers, strict=True) if not is_stored]

    def _run_puts(self) -> None:
        for staged in _taken(self._puts):
            self._pace(len(staged.objects) * staged.job.parts[staged.part].object_bytes)
            try:
                self._put(staged)
            except BaseException:  # noqa: BLE001 - as above
                _log.exception("putting a batch of save %d failed", staged.job.job_id)
            self._batch_done(staged.job)

    def _pace(self, num_bytes: int) -> None:
        """Wait until a put of so many bytes fits the write bandwidth."""
        rate = self._settings.write_bytes_per_s
        if rate is not None:
            now_s = self._clock.now_s()
            self._clock.sleep(max(0.0, self._next_put_s - now_s))
            self._next_put_s = max(self._next_put_s, now_s) + num_bytes / rate

    def _put(self, staged: _Staged) -> None:
        """Put a staged batch; what the store refuses for want of room is put again a few times."""
        part, marks = staged.job.parts[staged.part], staged.job.marks[staged.part]
        left, is_held = staged.objects, True
        place = {idx: position for position, idx in enumerate(staged.objects)}
        release = partial(self._save_slots.release, staged.slot)
        try:
            for attempt in range(self._settings.put_retries + 1):
                if attempt:
                    self._clock.sleep(self._settings.backoff_s * 2 ** (attempt - 1))
                keys = [part.keys[idx] for idx in left]
                sources = [_segments(staged.slot, place[idx], part.object_bytes) for idx in left]
                results = self._guard.call(partial(self._store.put, keys, sources), release)
                if results is None:
                    is_held = False
                    return
                _check_answers(keys, results)
                for idx, result in zip(left, results, strict=True):
                    marks[idx] = result in (PutResult.STORED, PutResult.ALREADY)
                left = [i for i, result in zip(left, results, strict=True) if result is PutResult.REFUSED]
                if not left:
                    return
        finally:
            if is_held:
                release()

    def _run_loads(self) -> None:
        for job in _taken(self._loads):
            is_loaded = False
            try:
                is_loaded = all(
                    self._load_batch(job, part_idx, start, stop)
                    for part_idx, part in enumerate(job.parts)
                    for start, stop in self._batches(part)
                )
            except BaseException:  # noqa: BLE001 - as above
                _log.exception("load %d failed", job.job_id)
            self._end(job, Outcome.DONE if is_loaded else self._not_done(job))

    def _load_batch(self, job: _Job, part_idx: int, start: int, stop: int) -> bool:
        """Load a run of objects; return whether all of them are in their blocks."""
        part = job.parts[part_idx]
        slot = None if job.cancelled else self._load_slots.acquire(self._settings.slot_timeout_s)
        if slot is None:
            return False
        release = partial(self._load_slots.release, slot)
        keys = part.keys[start:stop]
        targets = [_segments(slot, idx, part.object_bytes) for idx in range(stop - start)]
        results = self._guard.call(partial(self._store.get, keys, targets), release)
        if results is None:
            return False
        try:
            _check_answers(keys, results)
            missed = bytes(result is not GetResult.OK for result in results)
            job.marks[part_idx][start:stop] = missed
            self._discard([k for k, r in zip(keys, results, strict=True) if r is GetResult.CORRUPT])
            scatter = partial(self._io.scatter, part.spec_group, part.blocks[start:stop], slot.memory)
            return not any(missed) and _touch(job, scatter)
        finally:
            release()

    def _discard(self, keys: list[str]) -> None:
        """Remove payloads that failed their checksum or size: ``put`` would keep them for ever."""
        if keys:
            _log.warning("%d corrupt objects are discarded, first %s", len(keys), keys[0])
            self._guard.call(lambda: self._store.discard(keys), lambda: None)

    def _batches(self, part: GroupMove) -> Iterator[tuple[int, int]]:
        """Yield the part's objects in runs that fit a slot and a store call."""
        count = min(self._settings.slot_bytes // part.object_bytes, self._settings.batch_objects)
        if count == 0:
            raise TransferError(
                f"an object of spec group {part.spec_group} has {part.object_bytes} bytes, a staging slot "
                f"only {self._settings.slot_bytes}; raise slot_bytes"
            )
        for start in range(0, len(part.keys), count):
            yield start, min(start + count, len(part.keys))

    def _batch_done(self, job: _Job) -> None:
        with self._lock:
            job.batches_open -= 1
            is_last = job.batches_open == 0
        if is_last:
            is_stored = all(all(stored) for stored in job.marks)
            self._end(job, Outcome.DONE if is_stored else self._not_done(job))

    def _not_done(self, job: _Job) -> Outcome:
        return Outcome.CANCELLED if job.cancelled else Outcome.FAILED

    def _end(self, job: _Job, outcome: Outcome) -> None:
        self._ended.put(
            Ended(job_id=job.job_id, outcome=outcome, marks=tuple(bytes(marks) for marks in job.marks))
        )
        with self._idle:
            del self._jobs[job.job_id]
            self._idle.notify_all()


def _touch(job: _Job, copy: Callable[[], None]) -> bool:
    """Copy from or to engine blocks unless the job was cancelled; return whether it was done."""
    with job.touching:
        if not job.cancelled:
            copy()
        return not job.cancelled


def _segments(slot: Slot, position: int, object_bytes: int) -> Segments:
    return ((slot.address + position * object_bytes, object_bytes),)


def _taken(queue: "Queue[_Job | None] | Queue[_Staged | None]") -> Iterator:  # type: ignore[type-arg]
    while (item := queue.get()) is not None:
        yield item


def _check_answers(keys: list[str], results: Sequence[object]) -> None:
    if len(results) != len(keys):
        raise TransferError(f"a store gave {len(results)} answers for {len(keys)} keys")


def _drained(queue: "SimpleQueue | Queue") -> Iterator:  # type: ignore[type-arg]
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
