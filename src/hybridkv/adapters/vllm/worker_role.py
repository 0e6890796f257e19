"""The connector's worker role: carries out the scheduler's plans on one rank's memory."""

import logging
from collections.abc import Mapping
from copy import deepcopy

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.adapters.vllm import translate
from hybridkv.adapters.vllm.messages import StepMetadata, WorkerFacts, WorkerMetadata
from hybridkv.adapters.vllm.metrics import HybridKVStats, Reporter, worker_values
from hybridkv.adapters.vllm.settings import ConnectorSettings
from hybridkv.service.messages import JobKind, WorkerReport
from hybridkv.service.worker import WorkerSide
from hybridkv.stores.wrappers.metered import MeteredStore
from hybridkv.transfer.block_io import NumpyBlockIO
from hybridkv.transfer.moves import Ended, Outcome

_log = logging.getLogger(__name__)


class WorkerRole:
    """Starts jobs after a step's forward pass and tells which have ended.

    Args:
        store: owned by the caller.
        config: of the engine.
        cache: of this worker.
        settings: of the connector.

    Raises:
        ConfigError: a setting of the engine is not supported.
        SpecError: a cache group is of an unknown kind.
    """

    def __init__(
        self, store: MeteredStore, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        # vLLM later adds layers that share another's cache.
        self._cache = deepcopy(cache)
        self._layout = translate.layout_of(
            self._cache,
            name=config.model_config.model,
            parallel=config.parallel_config,
            speculative=config.speculative_config,
        )
        self._store, self._settings = store, settings
        self._rank = config.parallel_config.rank
        self._side: WorkerSide | None = None
        self._memory = ""
        self._report: WorkerReport | None = None
        self._carried: list[WorkerReport] = []
        self._loads: dict[int, str] = {}  # requests by the ids of their load jobs
        self._void: set[int] = set()  # jobs that were cancelled and have not been reported
        self._refused: set[str] = set()
        self._reporter = Reporter()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Work on the engine's memory; again after it was allocated anew, when the old jobs have ended.

        Raises:
            TransferError: the memory is not as the cache groups say.
        """
        pieces = translate.pieces_of(self._cache, tensors)
        if self._side is not None:
            self._side.close()
            self._carried.append(self._side.poll())
        self._side = WorkerSide(
            self._store,
            self._layout,
            NumpyBlockIO(self._layout, pieces),
            rank=self._rank,
            settings=self._settings.mover(max(group.object_bytes for group in self._layout.spec_groups)),
        )
        self._memory = translate.memory_digest(self._cache, tensors)

    def facts(self) -> WorkerFacts:
        """Return what the scheduler must know of this worker's memory."""
        return WorkerFacts(memory=self._memory)

    def start(self, meta: StepMetadata) -> None:
        """Start a step's jobs; the model has run."""
        self._loads |= {job.job_id: job.request_id for job in meta.plan.jobs if job.kind is JobKind.LOAD}
        self._void.update(meta.plan.cancelled)
        self._refused |= meta.refused
        if self._side is not None:
            self._side.start(meta.plan)

    def results(self) -> KVConnectorTransferResults:
        """Tell which loads have ended: each once, also those of requests that were aborted.

        A load that had ended before it was cancelled has filled its blocks with what is void now: it failed.
        """
        self._report = self._polled()
        ended, failed = set(self._refused), set(self._refused)
        self._refused.clear()
        for job in self._report.ended:
            is_void = job.job_id in self._void
            self._void.discard(job.job_id)
            if (request_id := self._loads.pop(job.job_id, None)) is not None:
                ended.add(request_id)
                if is_void or job.outcome is not Outcome.DONE:
                    failed.add(request_id)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def take_report(self) -> WorkerMetadata | None:
        """Return what the worker side has reported, if anything."""
        report, self._report = self._report, None
        if report is None or not (report.staged or report.ended):
            return None
        return WorkerMetadata(reports=(report,))

    def stats(self) -> HybridKVStats | None:
        """Return what was counted since the last call, if anything."""
        if self._side is None:
            return None
        return self._reporter.report(worker_values(self._side.metrics(), self._store, rank=self._rank))

    def close(self) -> None:
        """Stop; a second call does nothing."""
        if self._side is not None:
            self._side.close()

    def _polled(self) -> WorkerReport:
        reports, self._carried = self._carried, []
        if self._side is not None:
            reports.append(self._side.poll())
        staged: list[int] = [job_id for report in reports for job_id in report.staged]
        ended: list[Ended] = [one for report in reports for one in report.ended]
        return WorkerReport(rank=self._rank, staged=tuple(staged), ended=tuple(ended))
