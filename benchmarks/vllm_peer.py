"""vLLM 0.32.0's in-tree Mooncake store connector, driven without an engine.

The classes are vLLM's own and unchanged: ``MooncakeStoreWorker.lookup`` answers lookups,
``KVCacheStoreSendingThread._handle_request`` plans saves, ``get_kv_cache_coordinator`` gives local hits.
Workers come from ``object.__new__`` and get what ``__init__`` takes from process groups and config files.

Importing takes about 5 s; set ``VLLM_LOGGING_LEVEL=ERROR`` before.
"""

# ruff: noqa: SLF001

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStoreConnectorStats
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

Exists = Callable[[list[str]], list[int]]  # Mooncake's batch_is_exist: only 1 means present


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One vLLM cache group.

    Groups equal in kind, block_size, window and head_size have one spec: vLLM looks them up together, and the
    EAGLE flag of one counts for all. Vary head_size to keep two of them apart.
    """

    kind: Literal["full", "mla", "swa", "swa_mla", "mamba"]
    block_size: int
    window: int = 0  # tokens; swa and swa_mla only
    eagle: bool = False  # holds draft layers: hits of this group lose their last matched block
    layers: tuple[str, ...] = ("layer",)  # one memory region each in a save
    head_size: int = 64


@dataclass(slots=True)
class Door:
    """The store client that the peer sees: counts existence questions, swallows puts."""

    is_exist: Exists
    num_calls: int = 0
    num_keys: int = 0
    asked: list[str] = field(default_factory=list)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Answer from ``is_exist``, count, and keep the keys in ``asked`` (by reference where possible)."""
        self.num_calls += 1
        self.num_keys += len(keys)
        self.asked = self.asked + keys if self.asked else keys
        return self.is_exist(keys)

    def batch_put_from_multi_buffers(self, keys: list[str], *_: object) -> list[int]:
        """Move nothing and report success."""
        return [0] * len(keys)


def nothing(keys: list[str]) -> list[int]:
    """Answer like an empty store."""
    return [0] * len(keys)


def everything(keys: list[str]) -> list[int]:
    """Answer like a store that holds every key."""
    return [1] * len(keys)


def blob_hashes(blob: bytes, hash_size: int = 32) -> data.BlobBlockHashes:
    """View a flat blob as vLLM's lookup server does: one hash of ``hash_size`` bytes per hash unit."""
    return data.BlobBlockHashes(memoryview(blob), hash_size)


class Peer:
    """The peer of one model on ``tp`` tensor-parallel ranks (no PP, PCP or DCP).

    Attributes:
        alignment: tokens; divides every hit: the hash unit with partial hits, else the scheduler block.
        scheduler_block, hash_unit: tokens; lcm of the block sizes, tokens per hash, as vLLM resolved them.
        partial_hits: whether hits may end inside a block (align-mode Mamba with a finer hash unit).
        door: the store door of the latest call, with its counters.
        result: vLLM's own result object of the latest lookup.
    """

    def __init__(
        self, groups: Sequence[Group], *, hash_unit: int | None = None,
        tp: int = 1, num_kv_heads: int = 8, model: str = "model",
    ) -> None:  # fmt: skip
        """Resolve block sizes and build coordinator and workers with vLLM's own functions.

        Args:
            groups: cache groups in vLLM's order; the index is the group id in the keys.
            hash_unit: tokens per hash; divides every block size, with one group equals it; None: their gcd.
            tp: ranks. Full and window groups have keys for min(tp, num_kv_heads), Mamba for tp, MLA for one.
            num_kv_heads: of the whole model.
            model: the first part of every key.
        """
        self.groups, self.tp, self.num_kv_heads, self.model = tuple(groups), tp, num_kv_heads, model
        entries = [specs.KVCacheGroupSpec(list(g.layers), _spec(g), is_eagle_group=g.eagle) for g in groups]
        self._config = specs.KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=entries)
        first, box = groups[0].block_size, SimpleNamespace
        cache = box(block_size=first, prefix_match_unit=hash_unit, enable_prefix_caching=True)
        parallel = box(decode_context_parallel_size=1)
        vllm_config: Any = box(cache_config=cache, parallel_config=parallel, kv_transfer_config=object())
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(self._config, vllm_config)
        self.scheduler_block, self.hash_unit = sizes
        self.alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(self._config, vllm_config, *sizes)
        self.partial_hits = self.alignment < self.scheduler_block
        self.eagle = any(g.eagle for g in groups)
        self.coord = MooncakeStoreCoordinator(entries, *sizes, self.eagle, None, self.partial_hits)
        self._workers = [self._make_worker(rank) for rank in range(tp)]
        self.door, self.result = Door(nothing), data.MooncakeLookupResult(0)

    def lookup(self, num_tokens: int, hashes: Sequence[Any], is_exist: Exists) -> int:
        """Return the hit in tokens by ``MooncakeStoreWorker.lookup`` of rank 0, below ``num_tokens``.

        Args:
            num_tokens: length of the prompt.
            hashes: one chained hash per full hash unit: ``blob_hashes``, as in the engine, or list[bytes].
            is_exist: a client's ``batch_is_exist`` or alike; called at most once, its exceptions give 0.
        """
        self.door = self._workers[0].store = Door(is_exist)
        self.result = self._workers[0].lookup(num_tokens, hashes)
        return int(self.result.hit_length)

    def managers_hit(self, num_tokens: int, hashes: Sequence[Any], is_exist: Exists) -> int:
        """Return the hit in tokens of vLLM's local prefix cache if it held exactly the store's blocks.

        Every object is asked for, also those that ``lookup`` never asks, and put into a real ``BlockPool``.
        """
        units = [bytes(h) for h in hashes]
        coordinator = get_kv_cache_coordinator(
            self._config, max_model_len=1 << 24, max_in_flight_tokens=8192, use_eagle=self.eagle,
            enable_caching=True, enable_kv_cache_events=False, dcp_world_size=1, pcp_world_size=1,
            scheduler_block_size=self.scheduler_block, hash_block_size=self.hash_unit,
        )  # fmt: skip
        pool = coordinator.block_pool
        for gid, end in self._objects(len(units) * self.hash_unit):
            if all(code == 1 for code in is_exist(self.block_keys(gid, end, units))):
                unit_hash = kv_cache_utils.BlockHash(units[end // self.hash_unit - 1])
                key = kv_cache_utils.make_block_hash_with_group_id(unit_hash, gid)
                pool.cached_block_hash_to_block.insert(key, pool.blocks[1])
        return int(coordinator.find_longest_cache_hit(units, num_tokens - 1)[1])

    def save_plan(
        self, num_tokens: int, hashes: Sequence[Any], retention: int | None, *,
        rank: int = 0, start: int = 0, states: Sequence[int] = (), is_exist: Exists = everything,
    ) -> list[str]:  # fmt: skip
        """Return the keys of one rank's save, by the code of its sending thread, without the transfer.

        With ``everything`` that code ends after its existence check: masks and key strings. With ``nothing``
        it also computes every block's addresses and calls the (empty) put.

        Args:
            num_tokens: length of the prompt, all of it computed.
            hashes: as for ``lookup``; when timing, pass the list[bytes] that the engine has here.
            retention: tokens; None keeps tails at every boundary, 0 (vLLM's default) only at the end of the
                prompt, else a multiple of ``scheduler_block``.
            rank: tensor-parallel rank.
            start: tokens already saved by earlier steps of the request.
            states: token counts, multiples of ``hash_unit``, of the recurrent states handed off.
            is_exist: answers the save's own existence check.
        """
        self.coord.retention_interval = retention
        sizes = tuple(g.block_size for g in self.groups)
        meta = data.ReqMeta(
            "r",
            num_tokens // self.scheduler_block * self.scheduler_block,
            _block_ids(num_tokens, sizes),
            hashes if isinstance(hashes, list) else list(hashes),
            store_job_id=0,
            num_prompt_tokens=num_tokens,
            prefill_end_tokens=num_tokens,
            completed_token_len=num_tokens,
            publish_partial_tail=self.partial_hits,
            boundary_puts=[data.BoundaryPut(g, 1, end) for g in self.coord.mamba_group_ids for end in states],
        )
        if self.partial_hits:  # vLLM's scheduler adds the attention blocks below the last state
            meta.boundary_puts += scheduler._partial_tail_non_mamba_puts(self.coord, meta, sizes)
        thread = self._workers[rank].kv_send_thread
        self.door = thread.store = Door(is_exist)
        thread._saved_offset["r"] = start
        thread.add_request(meta)
        thread._handle_request(thread.request_queue.get())
        thread.delete_finished_stored_request("r")
        return self.door.asked

    def saved_keys(
        self, num_tokens: int, hashes: Sequence[Any], retention: int | None, states: Sequence[int] = ()
    ) -> list[str]:
        """Return the keys that the saves of all ranks put into an empty store (see ``save_plan``)."""
        plans = (self.save_plan(num_tokens, hashes, retention, rank=r, states=states) for r in range(self.tp))
        return list(dict.fromkeys(key for plan in plans for key in plan))

    def all_keys(self, num_tokens: int, hashes: Sequence[Any]) -> list[str]:
        """Return the keys of every object of every group up to ``num_tokens``, on all ranks."""
        objects = self._objects(min(num_tokens, len(hashes) * self.hash_unit))
        return [key for gid, end in objects for key in self.block_keys(gid, end, hashes)]

    def block_keys(self, gid: int, end: int, hashes: Sequence[Any]) -> list[str]:
        """Return the keys, one per rank, of group ``gid``'s block that ends at token ``end``."""
        unit_hash = hashes[end // self.hash_unit - 1].hex()
        return [
            data.PoolKey.build_key_string(p, unit_hash) for p in self._workers[0]._lookup_key_prefixes[gid]
        ]

    def _objects(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield group and end of every object: per block, with partial hits per hash unit."""
        for gid, group in enumerate(self.groups):
            step = self.hash_unit if self.partial_hits else group.block_size
            yield from ((gid, end) for end in range(step, num_tokens + 1, step))

    def _make_worker(self, rank: int) -> Any:  # noqa: ANN401
        """Return a vLLM worker for ``rank`` with the attributes that lookup and save read."""
        w: Any = object.__new__(worker.MooncakeStoreWorker)
        w.tp_rank, w.tp_size, w.num_kv_head, w.store_tp_size = rank, self.tp, self.num_kv_heads, None
        w.pp_size = w.pcp_size = w.dcp_size = 1
        w.block_size, w.hash_block_size = self.scheduler_block, self.hash_unit
        w._capacity_only, w.coord, w._kv_cache_groups = False, self.coord, self.coord.kv_cache_groups
        w._kv_connector_stats_lock, w.kv_connector_stats = threading.Lock(), MooncakeStoreConnectorStats()
        w._group_tp_replication_factors = factors = w._compute_group_tp_replication_factors()
        w.token_dbs = w._build_token_databases(data.KeyMetadata(self.model, rank, 0, 0, 0), None)
        w._init_lookup_key_prefixes()
        for db, group in zip(w.token_dbs, self.groups, strict=True):
            db.set_kv_caches_base_addr([(i + 1) << 32 for i in range(len(group.layers))])  # never read
            db.set_block_len([4096] * len(group.layers))
        w.kv_send_thread = worker.KVCacheStoreSendingThread(  # never started: save_plan calls it
            None, self.coord, w.token_dbs, w.block_size, rank, factors, "kv_both", threading.Event(),
            record_operation=w._record_kv_connector_operation,
        )  # fmt: skip
        return w


@functools.lru_cache(maxsize=4)
def _block_ids(num_tokens: int, block_sizes: tuple[int, ...]) -> tuple[list[int], ...]:
    """Return a block table per group, cached: the engine has it before a save."""
    return tuple(list(range(1, 2 + num_tokens // size)) for size in block_sizes)


def _spec(group: Group) -> specs.KVCacheSpec:
    """Return the vLLM spec of a group; everything but its geometry is arbitrary."""
    size, head_size, dtype = group.block_size, group.head_size, torch.bfloat16
    if group.kind == "mamba":
        return specs.MambaSpec(size, shapes=((head_size,),), dtypes=(dtype,), mamba_cache_mode="align")
    window = {"sliding_window": group.window} if group.kind.startswith("swa") else {}
    classes = {"full": specs.FullAttentionSpec, "mla": specs.MLAAttentionSpec,
               "swa": specs.SlidingWindowSpec, "swa_mla": specs.SlidingWindowMLASpec}  # fmt: skip
    return classes[group.kind](block_size=size, num_kv_heads=1, head_size=head_size, dtype=dtype, **window)
