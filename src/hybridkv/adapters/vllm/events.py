"""What saves have stored, as vLLM's KV events: for routers that send a prompt where its prefix lies."""

from collections.abc import Iterator

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from hybridkv.adapters.vllm.translate import DIGEST_BYTES
from hybridkv.service.progress import StoredEvent
from hybridkv.specs.layout import Layout

MEDIUM = "STORAGE"
"""Of every event: the store is no memory of the engine."""


def block_stored(event: StoredEvent, layout: Layout, cache: KVCacheConfig) -> Iterator[BlockStored]:
    """Yield an event for each of vLLM's cache groups that the stored objects belong to.

    Token ids are left out: the hashes name them, and the store never had them.
    """
    digests = event.block_hashes
    hashes = [
        maybe_convert_block_hash(BlockHash(digests[start : start + DIGEST_BYTES]))
        for start in range(0, len(digests), DIGEST_BYTES)
    ]
    parent = maybe_convert_block_hash(BlockHash(event.parent_hash)) if event.parent_hash else None
    for group_idx in layout.spec_groups[event.spec_group].cache_groups:
        spec = cache.kv_cache_groups[group_idx].kv_cache_spec
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=[],
            block_size=event.object_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=group_idx,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        )
