"""The worker side: carries out on one rank what the scheduler side planned."""

from hybridkv.clock import Clock
from hybridkv.errors import ConfigError
from hybridkv.service.messages import VERSION, Job, JobKind, StepPlan, WorkerReport
from hybridkv.specs.layout import Layout
from hybridkv.stores.base import Store
from hybridkv.transfer.block_io import BlockIO
from hybridkv.transfer.mover import Mover
from hybridkv.transfer.moves import GroupMove, MoverMetrics, MoverSettings


class WorkerSide:
    """One rank's jobs. Used by one thread; nothing here waits for a store.

    Args:
        store: where objects are; owned by the caller.
        layout: as this rank holds it: spec groups like the scheduler side's, bytes as they are here.
        block_io: reads and writes the engine's blocks.
        rank: tensor-parallel rank.
        settings: bounds and patience of the transfers.
        clock: for back-off and breaker.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        block_io: BlockIO,
        *,
        rank: int = 0,
        settings: MoverSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._layout, self._rank = layout, rank
        self._mover = Mover(store, block_io, settings or MoverSettings(), clock=clock)

    def start(self, plan: StepPlan) -> None:
        """Start a step's jobs; when this returns, the cancelled ones touch no engine block any more.

        Raises:
            ConfigError: the plan is of another version of the messages.
        """
        if plan.version != VERSION:
            raise ConfigError(f"a scheduler speaks version {plan.version} of the messages, not {VERSION}")
        for job_id in plan.cancelled:
            self._mover.cancel(job_id)
        for job in plan.jobs:
            if job.kind is JobKind.LOAD:
                self._mover.load(job.job_id, self._parts(job))
            else:
                self._mover.save(job.job_id, self._parts(job), ask_first=job.ask_first)

    def poll(self) -> WorkerReport:
        """Return what happened since the last call."""
        staged, ended = self._mover.poll()
        return WorkerReport(
            rank=self._rank,
            staged=tuple(staged),
            ended=tuple(ended),
        )

    def metrics(self) -> MoverMetrics:
        """Return what is under way, and the store calls since the start."""
        return self._mover.metrics()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left; return whether that came in time."""
        return self._mover.drain(timeout_s)

    def close(self) -> None:
        """Stop; a second call does nothing."""
        self._mover.close()

    def _parts(self, job: Job) -> tuple[GroupMove, ...]:
        parts = []
        for transfer in job.groups:
            group = self._layout.spec_groups[transfer.spec_group]
            # Ranks beyond the rank namespaces hold copies, neighbours the same one.
            rank = self._rank * group.num_ranks // self._layout.tp
            parts.append(
                GroupMove(
                    spec_group=group.index,
                    object_bytes=group.object_bytes,
                    keys=transfer.keys(job.fingerprint, rank),
                    blocks=transfer.block_ids(len(group.cache_groups), group.blocks_per_object),
                )
            )
        return tuple(parts)
