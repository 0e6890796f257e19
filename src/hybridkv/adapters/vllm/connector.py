"""The connector that vLLM loads; written against vLLM 0.32.

vLLM makes two of it. In a step::

    scheduler   find a hit | plan its load, pin its blocks | plan saves, pin theirs | send the plan
    worker                                                      the model runs | start the plan | report
    scheduler   unpin what no job touches any more | loaded requests run, failed ones are looked up again
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.adapters.vllm import translate
from hybridkv.adapters.vllm.messages import StepMetadata, WorkerFacts, WorkerMetadata
from hybridkv.adapters.vllm.metrics import HybridKVPromMetrics, HybridKVStats
from hybridkv.adapters.vllm.scheduler_role import SchedulerRole
from hybridkv.adapters.vllm.settings import ConnectorSettings
from hybridkv.adapters.vllm.worker_role import WorkerRole
from hybridkv.errors import ConfigError
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.stores.base import Store
from hybridkv.stores.registry import open_store, parse_store_uri
from hybridkv.stores.wrappers.metered import MeteredStore

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HybridKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands vLLM's calls to the scheduler role or the worker role, whichever this one is.

    Raises:
        ConfigError: a setting is wrong or not supported.
        SpecError: a cache group is of an unknown kind.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        translate.check_supported(vllm_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        with ExitStack() as opened:
            store = MeteredStore(self.open_store(settings.store))
            opened.callback(store.close)
            made = (store, vllm_config, kv_cache_config, settings)
            if role is KVConnectorRole.WORKER:
                self._worker = WorkerRole(*made)
                opened.callback(self._worker.close)
            else:
                self._scheduler = SchedulerRole(*made)
                opened.callback(self._scheduler.close)
            self._closing = opened.pop_all()

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

    def shutdown(self) -> None:
        """Stop this role; a second call does nothing."""
        self._closing.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this role has counted since the last call."""
        return (self._worker if self.role is KVConnectorRole.WORKER else self._scheduler).stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return statistics that have crossed between processes as an object again."""
        return HybridKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Register the metrics."""
        return HybridKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Work on the engine's memory; vLLM calls again when it has allocated it anew."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerFacts:
        """Tell the scheduler how this worker's blocks lie in memory."""
        return self._worker.facts()

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
        self._worker.start(cast("StepMetadata", self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Tell which loads have ended, and which of them have failed."""
        return self._worker.results()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Pass on what the worker side reports, if anything."""
        return self._worker.take_report()

    # ---- scheduler

    @property
    def _side(self) -> SchedulerSide:
        return self._scheduler.side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Keep the pool whose blocks are pinned."""
        self._scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn how the workers' blocks lie in memory: part of what must agree for bytes to be shared."""
        self._scheduler.learn(metadata)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request up, not waiting for the store; its load will be asynchronous."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that the engine has allocated for it."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Plan the saves of what the step will complete; return all that the workers shall do."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take what the workers report."""
        self._scheduler.report(connector_output)

    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request; vLLM may free its blocks at once."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until every pin is returned."""
        return self._scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        """Tell whether blocks will come free without a preemption."""
        return self._scheduler.will_free_blocks

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return what was stored since the last call, each object once, however many ranks hold it."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """Take nothing that was saved until now for cached any more; other engines' objects stay."""
        self._scheduler.reset()
        return True
