"""The connector's scheduler role: finds hits, plans loads and saves, pins the blocks that jobs use.

Nothing here may end the engine for the sake of a cache: what goes wrong for a request is logged, counted and
makes it compute.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.adapters.vllm import translate
from hybridkv.adapters.vllm.events import block_stored
from hybridkv.adapters.vllm.identity import TESTED_VERSIONS, current_hash_root, namespace_of, vllm_version
from hybridkv.adapters.vllm.messages import StepMetadata, WorkerFacts, WorkerMetadata
from hybridkv.adapters.vllm.metrics import HybridKVStats, Reporter, scheduler_values
from hybridkv.adapters.vllm.settings import ConnectorSettings, RequestSettings
from hybridkv.errors import ConfigError, TransferError
from hybridkv.keys import KeyScheme, Namespace
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.stores.wrappers.metered import MeteredStore

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class SchedulerRole:
    """Translates the scheduler's calls for the service's scheduler side.

    Args:
        store: owned by the caller.
        config: of the engine.
        cache: of the engine.
        settings: of the connector.

    Attributes:
        side: the service's part.
        num_errors: requests that were left alone because something of ours went wrong.

    Raises:
        ConfigError: a setting is wrong or not supported.
        SpecError: a cache group is of an unknown kind.
    """

    def __init__(
        self, store: MeteredStore, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        transfer = config.kv_transfer_config
        self._may_load, self._may_save = transfer.is_kv_consumer, transfer.is_kv_producer
        self._is_async, self._saves_output = settings.lookup_async, settings.save_decode_cache
        layout = translate.layout_of(
            cache,
            name=config.model_config.model,
            parallel=config.parallel_config,
            speculative=config.speculative_config,
        )
        self._has_states = bool(translate.recurrent_groups(layout))
        namespace = namespace_of(config, cache, model_version=settings.model_version)
        self._scheme = KeyScheme(namespace, layout, digest_bytes=translate.DIGEST_BYTES)
        self._driver = LookupDriver(store, self._scheme)
        self.side = SchedulerSide(self._driver, self._scheme, settings.scheduler(cache.num_blocks))
        self.num_errors = 0
        self._store, self._cache, self._reporter = store, cache, Reporter()
        self._has_events = bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events)
        self._events: list[BlockStored] = []
        self._pool: BlockPool
        self._wishes: dict[str, RequestSettings] = {}
        self._growing: dict[str, Request] = {}  # of which output is saved
        self._is_root_checked = False
        self._refused: set[str] = set()
        self._void: set[str] = set()  # requests whose load may have ended on a worker before a reset
        self._warn(config)

    def _warn(self, config: VllmConfig) -> None:
        if not (running := vllm_version()).startswith(TESTED_VERSIONS):
            _log.warning("vLLM is %s; hybridkv was tested with %s", running, " and ".join(TESTED_VERSIONS))
        if config.kv_transfer_config.kv_load_failure_policy != "recompute" and self._may_load:
            _log.warning(
                "kv_load_failure_policy is not 'recompute': vLLM will end a request whose load fails; "
                'set kv_load_failure_policy="recompute" in the kv_transfer_config'
            )
        interval = config.cache_config.prefix_cache_retention_interval
        if self._has_states and interval is not None:
            _log.warning(
                "prefix_cache_retention_interval is %s: vLLM hands recurrent states over only %s; a prompt "
                "that shares less than that with a saved one is computed from its start; set it to None to "
                "keep every state at the end of a step",
                interval,
                "at the ends of prompts" if interval == 0 else f"every {interval} tokens",
            )

    # ---- start

    def bind(self, pool: "BlockPool") -> None:
        """Keep the pool whose blocks are pinned."""
        self._pool = pool

    def learn(self, facts: Mapping[tuple[int, int], object]) -> None:
        """Take what the workers tell of their memory into the namespace, before the first request."""
        of_ours = {rank: one.memory for rank, one in facts.items() if isinstance(one, WorkerFacts)}
        if of_ours:
            memories = sorted(set(of_ours.values()))
            self._rename(kernel_layout=f"{self._namespace.kernel_layout} memory {'+'.join(memories)}")

    @property
    def _namespace(self) -> Namespace:
        return self._scheme.manifest.namespace

    def _rename(self, **changes: object) -> frozenset[str]:
        namespace = replace(self._namespace, **changes)  # type: ignore[arg-type]
        self._scheme = KeyScheme(namespace, self._scheme.layout, digest_bytes=translate.DIGEST_BYTES)
        return self.side.reset(self._scheme)

    # ---- requests

    def matched(self, request: "Request", num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the computed ones; ``None`` while not known."""
        hit: int | None = num_computed
        if not self._is_root_checked:
            self._check_root()
        with self._contained(request.request_id):
            hit = self._hit(request, num_computed)
        if hit is None:
            return None, False
        return hit - num_computed, hit > num_computed

    def _check_root(self) -> None:
        """Neither save nor load where block hashes are not the ones that the namespace names."""
        self._is_root_checked = True
        if (root := current_hash_root()) != self._namespace.hash_root:
            self._may_load = self._may_save = False
            _log.error(
                "nothing is saved or loaded: vLLM's block hashes begin with %s, which is not what "
                "PYTHONHASHSEED and prefix_caching_hash_algo gave when the connector was built; leave both "
                "as they are while the engine starts",
                root,
            )

    def _hit(self, request: "Request", num_computed: int) -> int | None:
        wishes = self._wishes_of(request)
        if not (wishes.load or wishes.save):
            return num_computed
        may_load = wishes.load and self._may_load and not request.skip_reading_prefix_cache
        may_save = wishes.save and self._may_save
        if self._is_async:
            return self.side.ask(
                request.request_id,
                request.num_tokens,
                lambda: b"".join(request.block_hashes),
                device_prefix=num_computed,
                may_load=may_load,
                may_save=may_save,
            )
        return self.side.find_hit(
            request.request_id,
            request.num_tokens,
            b"".join(request.block_hashes),
            device_prefix=num_computed,
            may_load=may_load,
            may_save=may_save,
        )

    def _wishes_of(self, request: "Request") -> RequestSettings:
        """Return what a request asks for; one that cannot be understood is neither saved nor loaded."""
        request_id = request.request_id
        if request_id not in self._wishes:
            try:
                wishes = RequestSettings.of(request.kv_transfer_params)
            except ConfigError as error:
                _log.warning("request %s is neither saved nor loaded: %s", request_id, error)
                wishes = RequestSettings(save=False, load=False)
            self._wishes[request_id] = wishes
        return self._wishes[request_id]

    def allocated(self, request: "Request", tables: tuple[list[int], ...], num_external: int) -> None:
        """Plan the load into the blocks that the engine has allocated for it, if it is to load."""
        request_id = request.request_id
        if self._saves_output:
            self._growing[request_id] = request
        if num_external == 0:
            self.side.started(request_id)
            return
        held: Iterable[tuple[int, int]] | None = None
        with self._contained(request_id):
            try:
                held = self.side.allocated(request_id, tables, num_loaded=num_external)
            except TransferError as error:
                _log.error("a load is refused, which is a bug of hybridkv: %s", error)
        if held is None:
            self._refused.add(request_id)
        else:
            self._pin(held)

    def finished(self, request: "Request", tables: tuple[list[int], ...]) -> None:
        """End the request; what its jobs still use stays pinned, so vLLM may free its blocks at once."""
        request_id = request.request_id
        with self._contained(request_id):
            if self._growing.pop(request_id, None) is not None:
                self._grow(request)
                self._pin(self.side.finished(request_id, request.num_computed_tokens, tables))
            else:
                self.side.forget(request_id)
        self._wishes.pop(request_id, None)

    def _grow(self, request: "Request") -> None:
        """Tell the service of output whose block hashes are there."""
        num_tokens = len(request.block_hashes) * self._scheme.layout.hash_unit
        if num_tokens > request.num_prompt_tokens:
            self.side.grown(request.request_id, num_tokens, lambda: b"".join(request.block_hashes))

    # ---- steps

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """Plan the saves of what the step will complete; return all that the workers shall do."""
        state = output.kv_connector_block_state
        for request_id, num_computed in _computed_after(output):
            if (growing := self._growing.get(request_id)) is not None:
                self._grow(growing)
            if not self.side.wants_save(request_id):
                continue
            with self._contained(request_id):
                tables = state.get_block_ids(request_id)
                states: list[int] = []
                if self._has_states:
                    offers = state.boundary_state_offloads.get(request_id, ())
                    tables, states = translate.with_states(self._scheme.layout, tables, offers)
                self._pin(self.side.advanced(request_id, num_computed, tables, states=states))
        refused, self._refused = frozenset(self._refused), set()
        return StepMetadata(plan=self.side.take_step(), refused=refused)

    def report(self, output: "KVConnectorOutput") -> None:
        """Take what the workers report and unpin what no job touches any more.

        A load that a worker ended before a reset is withheld from vLLM: the workers report it as failed with
        the next step.
        """
        meta = output.kv_connector_worker_meta
        for report in meta.reports if isinstance(meta, WorkerMetadata) else ():
            progress = self.side.report(report)
            self._unpin(progress.released)
            if self._has_events:
                for event in progress.stored:
                    self._events += block_stored(event, self._scheme.layout, self._cache)
        for request_id in self._void & (output.finished_recving or set()):
            self._void.discard(request_id)
            if request_id not in output.failed_recving:
                output.finished_recving.discard(request_id)
                self._refused.add(request_id)

    def reset(self) -> None:
        """Leave the namespace for a fresh one, as after a change of weights; others' objects stay."""
        # Not counted up: engines that share a store may have loaded different weights since they started.
        self._void |= self._rename(weights_epoch=secrets.randbits(62) + 1)

    def take_events(self) -> list[BlockStored]:
        """Return what was stored since the last call, if the engine publishes events."""
        events, self._events = self._events, []
        return events

    def stats(self) -> HybridKVStats | None:
        """Return what was counted since the last call, if anything."""
        return self._reporter.report(
            scheduler_values(self.side, self._driver.metrics(), self._store, num_errors=self.num_errors)
        )

    @property
    def will_free_blocks(self) -> bool:
        """Whether a job holds a block that no request needs any more."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for _, block in self.side.pinned)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed to give pins back or to report refused loads."""
        return bool(self._refused) or not self.side.is_idle

    def close(self) -> None:
        """Stop; a second call does nothing."""
        self._driver.close()

    # ---- inside

    @contextmanager
    def _contained(self, request_id: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on
            _log.exception("request %s is left alone, which is a bug of hybridkv", request_id)
            self.num_errors += 1
            self.side.forget(request_id)

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
