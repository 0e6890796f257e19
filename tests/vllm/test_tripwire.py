"""Fails by name when a vLLM brings something that the adapter was never told of.

What to do then: read what the new class or method asks of a connector, put it into the right table of
``translate.py`` or below, and serve it or refuse it.
"""

import inspect
from dataclasses import fields

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.sched.output import KVConnectorBlockState

from hybridkv.adapters.vllm import translate
from hybridkv.adapters.vllm.connector import HybridKVConnector

BASES = {"KVCacheSpec", "AttentionSpec"}
"""Nobody's cache: only others derive from them."""

SERVED = {
    name for name in vars(HybridKVConnector) if hasattr(KVConnectorBase_V1, name) and name[0] != "_"
} | {"request_finished_all_groups"}
"""What the connector says itself."""

LEFT_ALONE = {
    "bind_connector_metadata": "vLLM's own",
    "bind_kv_cache_manager": "its default hands the block pool over",
    "clear_connector_metadata": "vLLM's own",
    "finish_forward": "nothing of ours waits for the end of a forward pass",
    "get_block_ids_with_load_errors": "flat block ids mean nothing over several groups: requests are named",
    "get_external_cache_hit_sources": "one source",
    "get_finished": "get_transfer_results says more",
    "get_finished_count": "every worker reports",
    "get_kv_connector_kv_cache_events": "events come from the scheduler, once for all ranks",
    "get_loaded_kv_cache_group_ids": "the prefix-cacheable groups",
    "get_mem_pool_context": "any memory will do",
    "get_required_kvcache_layout": "any layout that keeps a layer's block together will do",
    "handle_preemptions": "what a save reads stays pinned",
    "has_connector_metadata": "vLLM's own",
    "on_new_request": "a request is of interest when it is looked up",
    "register_finished_partial_tail": "only whole blocks are saved",
    "request_finished": "for engines without several groups",
    "requires_piecewise_for_cudagraph": "nothing happens between layers",
    "reset_capture_state": "the worker has no state that a capture changes",
    "role": "vLLM's own",
    "set_host_xfer_buffer_ops": "blocks are copied by BlockIO",
    "set_xfer_handshake_metadata": "the one with pipeline stages says more",
    "supports_divergent_local_hybrid_hits": "a device prefix holds for all groups",
}
"""What the connector leaves to vLLM's default, and why."""


def spec_classes():
    return {
        name
        for name, found in vars(interface).items()
        if inspect.isclass(found) and issubclass(found, interface.KVCacheSpec)
    }


def connector_methods():
    return {
        name for base in (KVConnectorBase_V1, SupportsHMA) for name in vars(base) if not name.startswith("_")
    }


def test_every_kind_of_cache_of_this_vllm_is_translated_or_refused():
    known = {*translate.TRANSLATED, *translate.WRAPPERS, *translate.SCRATCH, *translate.REFUSED, *BASES}
    assert spec_classes() - known == set(), "kinds of cache that translate.py does not know"
    assert known - spec_classes() == set(), "kinds of cache that this vLLM does not have any more"


def test_every_method_of_a_connector_is_served_or_left_alone_for_a_reason():
    known = SERVED | set(LEFT_ALONE)
    assert connector_methods() - known == set(), "methods that connector.py does not know"
    assert known - connector_methods() == set(), "methods that this vLLM does not call any more"
    assert SERVED & set(LEFT_ALONE) == set()


def test_no_method_is_left_abstract():
    assert HybridKVConnector.__abstractmethods__ == frozenset()


def test_what_a_cache_group_says_is_known():
    """A new field may change which groups a prefix needs, or where their blocks lie."""
    assert {one.name for one in fields(interface.KVCacheGroupSpec)} == {
        "layer_names",
        "kv_cache_spec",
        "is_eagle_group",
        "host_resident",
        "enable_kv_transfer",
        "role",
    }


def test_what_a_spec_says_is_known():
    """A new field may change what a prefix needs."""
    known = {
        "FullAttentionSpec": {"sliding_window", "attention_chunk_size", "non_causal"},
        "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens"},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
        "MambaSpec": {
            "shapes",
            "dtypes",
            "page_size_padded",
            "mamba_type",
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
            "prefill_checkpoint_alignment",
            "num_heads",
            "tokens_per_state",
            "tp_replicated",
        },
    }
    for name, mine in known.items():
        found = getattr(interface, name)
        of_base = {one.name for one in fields(found.__mro__[1])}
        assert {one.name for one in fields(found)} - of_base == mine, name


def test_the_hand_off_of_states_and_the_events_are_as_they_are_read():
    assert {"req_ids", "resolve_block_ids", "boundary_state_offloads"} == {
        one.name for one in fields(KVConnectorBlockState)
    }
    assert {"group_idx", "kv_cache_spec_kind", "parent_block_hash"} <= set(BlockStored.__struct_fields__)
