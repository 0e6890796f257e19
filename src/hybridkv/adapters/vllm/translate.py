"""vLLM's description of its KV cache in hybridkv's terms; written against vLLM 0.32.

A layer's cache is a tensor ``[blocks, heads, tokens, content]``, K and V side by side in the content, strided
over memory that layers of other cache groups use too; a recurrent layer's states are bytes in the content::

    layer 0 | block 0 | block 1 | ...        a group's first layer, and the first layers of other groups
    layer 1 | block 0 | block 1 | ...        a block id belongs to one group at a time
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import prod
from typing import Any

import torch
from vllm.config import ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from hybridkv.errors import ConfigError, SpecError, TransferError
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.transfer.block_pieces import BlockPiece, HostMemory

DIGEST_BYTES = 32
"""Length of vLLM's block hashes with the algorithms that ``identity.namespace_of`` accepts."""


def _full(spec: FullAttentionSpec) -> CacheSpec:
    # Its window, if any, only bounds what is read: vLLM keeps blocks of the whole prefix.
    return Full(block_size=spec.block_size)


def _mla(spec: MLAAttentionSpec) -> CacheSpec:
    return MLA(block_size=spec.block_size)


def _sliding_window(spec: SlidingWindowSpec) -> CacheSpec:
    return SlidingWindow(
        block_size=spec.block_size, window=spec.sliding_window, extra=spec.extra_retained_tokens
    )


def _chunked_local(spec: ChunkedLocalAttentionSpec) -> CacheSpec:
    return ChunkedLocal(block_size=spec.block_size, chunk=spec.attention_chunk_size)


def _recurrent(spec: MambaSpec) -> CacheSpec:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}: vLLM keeps no state of a prefix; serve "
            "with prefix caching on and mamba_cache_mode 'align'"
        )
    return Recurrent(block_size=spec.block_size)


TRANSLATED: dict[str, Callable[[Any], CacheSpec]] = {
    "FullAttentionSpec": _full,
    "MLAAttentionSpec": _mla,
    "SlidingWindowSpec": _sliding_window,
    "SlidingWindowMLASpec": _sliding_window,
    "ChunkedLocalAttentionSpec": _chunked_local,
    "MambaSpec": _recurrent,
}
"""By name of the exact class: vLLM derives specs with other needs from these."""

WRAPPERS = ("UniformTypeKVCacheSpecs",)
"""Hold one spec a layer, all of one kind."""

SCRATCH = ("CircularBufferSpec", "HiSparseHotSpec", "HiSparseResidentSpec")
"""Never prefix-cacheable: vLLM fills them anew after a hit."""

REFUSED: dict[str, str] = {
    "CrossAttentionSpec": "its keys come from an encoder's input, which a prompt's prefix does not name",
    "EncoderOnlyAttentionSpec": "an encoder reads the whole prompt, so no prefix of it can be reused",
    "HiddenStateCacheSpec": "it holds hidden states for extraction, not a cache of attention",
    "RSWASpec": "it drops blocks between the prompt and the generated tokens, which no kind here describes",
    "SinkFullAttentionSpec": "its sink tokens lie outside of the blocks that a prefix names",
}
"""By name of the exact class, why."""


def check_supported(config: VllmConfig) -> None:
    """Refuse settings of the engine that this adapter cannot serve.

    Raises:
        ConfigError: naming the setting and the reason.
    """
    parallel = config.parallel_config
    reason = (
        "it spreads the tokens of one block over several ranks, and hybridkv's objects hold whole blocks; "
        "set it to 1"
    )
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, setting)) > 1:
            raise ConfigError(f"{setting} is {size}, which hybridkv does not support: {reason}")


def layout_of(
    config: KVCacheConfig,
    *,
    name: str,
    parallel: ParallelConfig | None = None,
    speculative: SpeculativeConfig | None = None,
) -> Layout:
    """Return the layout of an engine's cache groups.

    Args:
        config: of the engine. A worker's knows the layers of its own pipeline stage, each with its own bytes;
            the scheduler's is one worker's with a single layer's bytes for a group of unequal ones. Spec
            groups are equal in all of them, bytes need not be.
        name: of the model, for messages.
        parallel: of the engine; ``None`` = one rank.
        speculative: of the engine.

    Raises:
        SpecError: a group is of a kind that is not translated; the message names it.
        ConfigError: a group's state is not kept by the engine, or a pipeline stage has no layer of a group.
    """
    tp = parallel.tensor_parallel_size if parallel else 1
    stages = parallel.pipeline_parallel_size if parallel else 1
    drops = speculative is not None and speculative.use_eagle_block_drop()
    # Where vLLM cannot tell which groups the draft model has, it treats all as such.
    all_eagle = drops and not any(group.is_eagle_group for group in config.kv_cache_groups)
    groups = [
        _group(idx, group, tp=tp, stages=stages, is_eagle=drops and (all_eagle or group.is_eagle_group))
        if idx in config.prefix_cacheable_group_ids
        else _scratch(idx, group)
        for idx, group in enumerate(config.kv_cache_groups)
    ]
    return Layout(
        name=name, groups=tuple(groups), hash_unit=config.hash_block_size or 0, tp=tp * stages, source="vLLM"
    )


def _scratch(idx: int, group: KVCacheGroupSpec) -> CacheGroup:
    return CacheGroup(
        name=f"{idx} {type(group.kv_cache_spec).__name__}",
        spec=Full(block_size=group.kv_cache_spec.block_size),
        prefix_cacheable=False,
    )


def _group(idx: int, group: KVCacheGroupSpec, *, tp: int, stages: int, is_eagle: bool) -> CacheGroup:
    where = (
        f"cache group {idx} ({type(group.kv_cache_spec).__name__}: {', '.join(group.layer_names[:2])}, ...)"
    )
    if not group.layer_names:
        raise ConfigError(
            f"{where}: this pipeline stage holds no layer of it; use a pipeline_parallel_size with which "
            "every stage has layers of all kinds"
        )
    if group.host_resident:
        raise SpecError(f"{where} lies in host memory that hybridkv does not read; turn HiSparse off")
    specs = list(iter_layer_specs(group.kv_cache_spec))
    (spec, *others) = {_translated(layer, where) for layer in specs}
    if others:
        raise SpecError(f"{where} holds layers with different needs, {spec} and {others[0]}")
    shards = _distinct_ranks(specs[0], tp) * stages
    total = sum(map(_page_bytes, specs)) * (len(group.layer_names) if len(specs) == 1 else 1)
    return CacheGroup(
        name=f"{idx} {type(specs[0]).__name__}",
        spec=spec,
        layer_block_bytes=total * shards,
        shards=shards,
        lookahead=spec.block_size if is_eagle else 0,
    )


def _translated(spec: KVCacheSpec, where: str) -> CacheSpec:
    kind = type(spec).__name__
    if kind in TRANSLATED:
        return TRANSLATED[kind](spec)
    reason = REFUSED.get(
        kind, f"it is of a kind that hybridkv does not know; it knows {', '.join(TRANSLATED)}"
    )
    raise SpecError(f"{where}, {kind}: {reason}")


def _page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of one layer's block on one rank, without padding."""
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    assert isinstance(spec, MambaSpec)  # noqa: S101 - nothing else is translated
    return int(spec.real_page_size_bytes)


def _distinct_ranks(spec: KVCacheSpec, tp: int) -> int:
    """Return how many tensor-parallel ranks hold bytes that differ, as far as vLLM tells; else all."""
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else tp
    shards = spec.max_tp_shards if isinstance(spec, AttentionSpec) else None
    return shards if shards and tp % shards == 0 else tp


def recurrent_groups(layout: Layout) -> tuple[int, ...]:
    """Return the cache groups whose blocks are handed off, never found by position."""
    return tuple(
        idx
        for group in layout.spec_groups
        for idx in group.cache_groups
        if group.spec.written_only_at_step_end
    )


def with_states(
    layout: Layout, tables: Iterable[list[int]], offers: Iterable[tuple[int, int, int]]
) -> tuple[list[list[int]], list[int]]:
    """Return the block tables with recurrent groups' blocks exactly as they were handed off.

    Args:
        layout: of the engine.
        tables: block ids a cache group; those of recurrent groups are sparse and change in place.
        offers: (cache group, block id, tokens) of states that are whole after the step.

    Returns:
        The tables, and after how many tokens they hold states.
    """
    filled = list(tables)
    for idx in recurrent_groups(layout):
        filled[idx] = []
    states = []
    for idx, block, num_tokens in offers:
        size = layout.groups[idx].spec.block_size
        if num_tokens % size:
            continue  # of a part of a block, which goes on changing
        place = num_tokens // size - 1
        filled[idx] += [0] * (place + 1 - len(filled[idx]))
        filled[idx][place] = block
        states.append(num_tokens)
    return filled, states


def pieces_of(
    config: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> list[list[BlockPiece[HostMemory]]]:
    """Return where the blocks of each group's layers lie, in the order of ``layout_of``.

    Args:
        config: of the engine.
        tensors: each layer's cache, shape (kernel blocks, heads, tokens, content), on the CPU.

    Raises:
        TransferError: a layer has no tensor, or its blocks are not dense in it.
    """
    return [
        [_piece(layer, tensors.get(layer), config.num_blocks) for layer in group.layer_names]
        if idx in config.prefix_cacheable_group_ids
        else []
        for idx, group in enumerate(config.kv_cache_groups)
    ]


def memory_digest(config: KVCacheConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return 16 hex digits that differ where the bytes of a block have another meaning on another worker.

    Kernels may split a block into smaller ones, pack heads, or order the axes otherwise: shape, order of
    strides and element type of each layer tell.
    """
    facts = []
    for idx in config.prefix_cacheable_group_ids:
        for layer in config.kv_cache_groups[idx].layer_names:
            tensor = tensors[layer]
            per_block = tensor.shape[0] // config.num_blocks
            order = sorted(range(1, tensor.dim()), key=lambda axis: (tensor.stride(axis), axis))
            facts.append((idx, per_block, tuple(tensor.shape[1:]), order, str(tensor.dtype)))
    return sha256(repr(facts).encode()).hexdigest()[:16]


def _piece(layer: str, tensor: torch.Tensor | None, num_blocks: int) -> BlockPiece[HostMemory]:
    expected = f"{num_blocks} blocks on the CPU are expected"
    if tensor is None or tensor.device.type != "cpu" or tensor.shape[0] % num_blocks:
        found = "none" if tensor is None else f"{tuple(tensor.shape)} on {tensor.device}"
        raise TransferError(f"layer {layer}: its cache is {found}; {expected}")
    per_block, shape, strides = tensor.shape[0] // num_blocks, tensor.shape[1:], tensor.stride()[1:]
    numel = prod(shape)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if span != numel or (per_block > 1 and tensor.stride(0) != numel):
        raise TransferError(
            f"layer {layer}: a block of shape {tuple(shape)} with strides {strides} is not dense; use a KV "
            "cache layout that keeps a layer's block together, such as LBHNC"
        )
    item = tensor.element_size()
    # As bytes, whatever the dtype: numpy has no bfloat16.
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return BlockPiece(
        memory=memory,
        block_bytes=per_block * numel * item,
        stride_bytes=per_block * tensor.stride(0) * item,
        offset_bytes=tensor.storage_offset() * item,
        num_blocks=num_blocks,
    )
