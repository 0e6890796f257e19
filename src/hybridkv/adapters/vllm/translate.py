"""vLLM's description of its KV cache in hybridkv's terms; written against vLLM 0.32.

A layer's cache is a tensor ``[blocks, heads, tokens, content]``, K and V side by side in the content, strided
over memory that layers of other cache groups use too::

    layer 0 | block 0 | block 1 | ...        a group's first layer, and the first layers of other groups
    layer 1 | block 0 | block 1 | ...        a block id belongs to one group at a time
"""

from collections.abc import Callable, Mapping
from math import prod

import torch
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from hybridkv.errors import ConfigError, SpecError, TransferError
from hybridkv.keys import Namespace
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.transfer.block_pieces import BlockPiece, HostMemory

DIGEST_BYTES = 32
"""Length of vLLM's block hashes with the algorithms of ``namespace_of``."""


def _full(spec: FullAttentionSpec) -> CacheSpec:
    # Its window, if any, only bounds what is read: vLLM keeps blocks of the whole prefix.
    return Full(block_size=spec.block_size)


def _sliding_window(spec: SlidingWindowSpec) -> CacheSpec:
    return SlidingWindow(
        block_size=spec.block_size, window=spec.sliding_window, extra=spec.extra_retained_tokens
    )


_SPECS: dict[type[KVCacheSpec], Callable[..., CacheSpec]] = {
    FullAttentionSpec: _full,
    SlidingWindowSpec: _sliding_window,
}
"""By exact class: vLLM derives specs with other needs from these."""


def check_supported(config: VllmConfig) -> None:
    """Refuse settings of the engine that this adapter cannot serve yet.

    Raises:
        ConfigError: naming the setting.
    """
    parallel = config.parallel_config
    unsupported = {
        "tensor_parallel_size": parallel.tensor_parallel_size > 1,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "speculative_config": config.speculative_config is not None,
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise ConfigError(f"{setting} is set; hybridkv's vLLM adapter does not support it yet, remove it")


def layout_of(config: KVCacheConfig, *, name: str) -> Layout:
    """Return the layout of an engine's cache groups.

    Args:
        config: of the engine, as both connector roles get it.
        name: of the model, for messages.

    Raises:
        SpecError: a group is of a kind that is not translated; the message names it.
    """
    groups = [
        _group(idx, group, cacheable=idx in config.prefix_cacheable_group_ids)
        for idx, group in enumerate(config.kv_cache_groups)
    ]
    return Layout(name=name, groups=tuple(groups), hash_unit=config.hash_block_size or 0, source="vLLM")


def _group(idx: int, group: KVCacheGroupSpec, *, cacheable: bool) -> CacheGroup:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    is_known = isinstance(spec, AttentionSpec) and type(spec) in _SPECS
    if not is_known or not cacheable or group.host_resident or group.is_eagle_group:
        raise SpecError(
            f"cache group {idx} ({kind}: {', '.join(group.layer_names[:2])}, ...) is of a kind that "
            f"hybridkv's vLLM adapter does not know; it knows {', '.join(known.__name__ for known in _SPECS)}"
        )
    return CacheGroup(
        name=f"{idx} {kind}",
        spec=_SPECS[type(spec)](spec),
        layers=len(group.layer_names),
        layer_block_bytes=spec.unpadded_page_size_bytes,
        shards=spec.num_kv_heads,
    )


def namespace_of(config: VllmConfig, cache: KVCacheConfig, *, model_version: str) -> Namespace:
    """Return what beside the layout must agree for bytes to be exchangeable.

    Raises:
        ConfigError: the block hashes are not the same in every process.
    """
    algorithm = config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose hashes can collide and differ between "
            "processes; use sha256 or sha256_cbor"
        )
    hash_function = get_hash_fn_by_name(algorithm)
    specs = (group.kv_cache_spec for group in cache.kv_cache_groups)
    dtypes = {str(spec.dtype) for spec in specs if isinstance(spec, AttentionSpec)}
    return Namespace(
        model_version=model_version,
        kv_dtype=" ".join(sorted(dtypes)),
        quantization=config.cache_config.cache_dtype,
        kernel_layout=cache.kv_cache_layout or "",
        hash_algorithm=algorithm,
        hash_root=hash_function(resolve_none_hash_seed(hash_function)).hex(),
    )


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
        for group in config.kv_cache_groups
    ]


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
