"""The connector that vLLM loads; written against vLLM 0.32.

vLLM makes two of it. In a step::

    scheduler   find a hit | plan its load, pin its blocks | plan saves, pin theirs | send the plan
    worker                                                      the model runs | start the plan | report
    scheduler   unpin what no job touches any more | loaded requests run, failed ones are looked up again
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from hybridkv.adapters.vllm import translate
from hybridkv.errors import ConfigError, TransferError
from hybridkv.keys import KeyScheme
from hybridkv.plan.boundaries import Retention
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.messages import JobKind, StepPlan, WorkerReport
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.service.worker import WorkerSide
from hybridkv.stores.base import Store
from hybridkv.stores.registry import open_store, parse_store_uri
from hybridkv.suggest import nearest
from hybridkv.transfer.block_io import NumpyBlockIO
from hybridkv.transfer.moves import Outcome

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

PINNED_SHARE = 4
"""Jobs hold at most this part (1 / n) of the engine's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What ``kv_connector_extra_config`` may hold.

    Attributes:
        store: URI of the store.
        model_version: names weights and effective configuration; the user vouches for it.
        retention: which boundaries the store keeps.
    """

    store: str
    model_version: str
    retention: Retention = "all"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read the settings strictly.

        Raises:
            ConfigError: a key is unknown or missing.
        """
        known = list(cls.__slots__)
        for key in extra:
            if key not in known:
                raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{nearest(key, known)}")
        for key in ("store", "model_version"):
            if not isinstance(extra.get(key), str):
                raise ConfigError(f"kv_connector_extra_config: {key} is {extra.get(key)!r}; give a text")
        return cls(**extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers.

    Attributes:
        plan: of the service.
        refused: requests whose load cannot be started.
    """

    plan: StepPlan
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: what each rank reports."""

    reports: tuple[WorkerReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Return the reports of both."""
        return WorkerMetadata(reports=self.reports + cast("WorkerMetadata", other).reports)


class HybridKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Translates between vLLM and the service's scheduler side or worker side.

    Raises:
        ConfigError: a setting is wrong or not supported.
        SpecError: a cache group is of an unknown kind.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        translate.check_supported(vllm_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        namespace = translate.namespace_of(vllm_config, kv_cache_config, model_version=settings.model_version)
        layout = translate.layout_of(kv_cache_config, name=vllm_config.model_config.model)
        self._scheme = KeyScheme(namespace, layout, digest_bytes=translate.DIGEST_BYTES)
        self._closing = ExitStack()
        self._store = self.open_store(settings.store)
        self._closing.callback(self._store.close)
        if role is KVConnectorRole.WORKER:
            self._worker: WorkerSide
            self._report: WorkerReport | None = None
            self._loads: dict[int, str] = {}  # requests by the ids of their load jobs
            self._refused: set[str] = set()
        else:
            self._pool: BlockPool
            driver = LookupDriver(self._store, self._scheme)
            self._closing.callback(driver.close)
            pinned = kv_cache_config.num_blocks // PINNED_SHARE
            self._side = SchedulerSide(
                driver, self._scheme, SchedulerSettings(retention=settings.retention, pinned_blocks=pinned)
            )
            self._refused = set()
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                _log.warning(
                    "kv_load_failure_policy is not 'recompute': vLLM will end a request whose load fails; "
                    'set kv_load_failure_policy="recompute" in the kv_transfer_config'
                )

    def open_store(self, uri: str) -> Store:
        """Return the store for this role; scheduler and workers open one each and must see the same objects.

        Raises:
            ConfigError: they would not.
        """
        if parse_store_uri(uri).scheme == "memory":
            raise ConfigError("store: scheduler and worker would each have a memory store of their own")
        return open_store(uri)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is only a later miss."""
        return False

    # ---- worker

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Start the worker side on the engine's memory."""
        pieces = translate.pieces_of(self._kv_cache_config, kv_caches)
        self._worker = WorkerSide(self._store, self._scheme, NumpyBlockIO(self._scheme.layout, pieces))
        self._closing.callback(self._worker.close)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Nothing: loads are asynchronous and start with the step's other jobs."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request computes before its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing: what a step computed is saved after it."""

    def wait_for_save(self) -> None:
        """Start the step's jobs; the model has run."""
        meta = cast("StepMetadata", self._get_connector_metadata())
        self._loads |= {job.job_id: job.request_id for job in meta.plan.jobs if job.kind is JobKind.LOAD}
        self._refused |= meta.refused
        self._worker.start(meta.plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Tell which loads have ended: each once, also those of requests that were aborted."""
        self._report = self._worker.poll()
        ended, failed = set(self._refused), set(self._refused)
        self._refused.clear()
        for job in self._report.ended:
            if (request_id := self._loads.pop(job.job_id, None)) is not None:
                ended.add(request_id)
                if job.outcome is not Outcome.DONE:
                    failed.add(request_id)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Pass on what the worker side reports, if anything."""
        report, self._report = self._report, None
        if report is None or not (report.staged or report.ended):
            return None
        return WorkerMetadata(reports=(report,))

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Keep the pool whose blocks are pinned."""
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request up; its load will be asynchronous."""
        hit = self._side.find_hit(
            request.request_id,
            request.num_tokens,
            b"".join(request.block_hashes),
            device_prefix=num_computed_tokens,
            may_load=not request.skip_reading_prefix_cache,
        )
        return hit - num_computed_tokens, hit > num_computed_tokens

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that the engine has allocated for it."""
        if num_external_tokens == 0:
            return
        try:
            self._pin(self._side.allocated(request.request_id, blocks.get_block_ids()))
        except TransferError as error:
            _log.error("a load is refused, which is a bug of hybridkv: %s", error)
            self._refused.add(request.request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Plan the saves of what the step will complete; return all that the workers shall do."""
        state = scheduler_output.kv_connector_block_state
        for request_id, num_computed in _computed_after(scheduler_output):
            if self._side.wants_save(request_id):
                self._pin(self._side.advanced(request_id, num_computed, state.get_block_ids(request_id)))
        refused, self._refused = frozenset(self._refused), set()
        return StepMetadata(plan=self._side.take_step(), refused=refused)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take what the workers report and unpin what no job touches any more."""
        meta = connector_output.kv_connector_worker_meta
        for report in meta.reports if isinstance(meta, WorkerMetadata) else ():
            self._unpin(self._side.report(report).released)

    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request; what its jobs still use stays pinned, so vLLM may free its blocks at once."""
        self._side.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until every pin is returned."""
        return not self._side.is_idle

    def has_pending_block_frees(self) -> bool:
        """Tell that blocks will come free without a preemption."""
        return self._side.num_pinned > 0

    def shutdown(self) -> None:
        """Stop this role; a second call does nothing."""
        self._closing.close()

    def _pin(self, blocks: Iterable[tuple[int, int]]) -> None:
        self._pool.touch([self._pool.blocks[block] for _, block in blocks])

    def _unpin(self, blocks: Iterable[tuple[int, int]]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for _, block in blocks])


def _computed_after(step: "SchedulerOutput") -> Iterator[tuple[str, int]]:
    """Yield the scheduled requests, each with its computed tokens once the step has ended."""
    new, cached = step.scheduled_new_reqs, step.scheduled_cached_reqs
    before = {one.req_id: one.num_computed_tokens for one in new}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        yield request_id, before[request_id] + num_tokens
