"""Cache groups of all kinds in hybridkv's terms, with vLLM's own classes."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from hybridkv.adapters.vllm import translate
from hybridkv.errors import ConfigError, SpecError
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow

SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
PAGE = 2 * 32 * (16 + 16) * 4
LATENT = {**SIZES, "num_kv_heads": 1, "max_tp_shards": 1}


def mamba(**changes):
    return MambaSpec(
        **{
            "block_size": 64,
            "shapes": ((3, 4), (5,)),
            "dtypes": (torch.float32, torch.bfloat16),
            "mamba_cache_mode": "align",
            **changes,
        }
    )


def config(*specs, eagle=(), **changes):
    groups = [
        KVCacheGroupSpec([f"model.{idx}", f"model.{idx}.more"], spec, is_eagle_group=idx in eagle)
        for idx, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **changes)


@dataclass
class Parallel:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


def layout(*specs, tp=1, pp=1, drops=None, **how):
    speculative = None if drops is None else SimpleNamespace(use_eagle_block_drop=lambda: drops)
    return translate.layout_of(
        config(*specs, **how), name="tiny", parallel=Parallel(tp, pp), speculative=speculative
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FullAttentionSpec(**SIZES), Full(block_size=32)),
        (FullAttentionSpec(**SIZES, sliding_window=64), Full(block_size=32)),
        (MLAAttentionSpec(**LATENT), MLA(block_size=32)),
        (
            SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=2),
            SlidingWindow(block_size=32, window=64, extra=2),
        ),
        (SlidingWindowMLASpec(**LATENT, sliding_window=64), SlidingWindow(block_size=32, window=64)),
        (
            ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128),
            ChunkedLocal(block_size=32, chunk=128),
        ),
        (mamba(), Recurrent(block_size=64)),
    ],
)
def test_each_kind_has_its_rule(spec, expected):
    (group,) = layout(spec).spec_groups
    assert group.spec == expected


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (CrossAttentionSpec(**SIZES), "an encoder's input"),
        (HiddenStateCacheSpec(**LATENT), "hidden states"),
        (RSWASpec(**SIZES, rswa_window=64), "drops blocks"),
        (SinkFullAttentionSpec(**SIZES, sink_len=4), "sink tokens"),
    ],
)
def test_what_has_no_rule_is_refused_with_the_reason(spec, reason):
    with pytest.raises(SpecError, match=rf"cache group 1 \({type(spec).__name__}: model\.1, .*{reason}"):
        layout(FullAttentionSpec(**SIZES), spec)


def test_a_class_that_nobody_has_heard_of_is_refused_by_name():
    class NovelSpec(FullAttentionSpec):
        pass

    with pytest.raises(SpecError, match=r"NovelSpec: it is of a kind that hybridkv does not know"):
        layout(NovelSpec(**SIZES))


def test_scratch_groups_take_part_in_nothing():
    found = layout(FullAttentionSpec(**SIZES), CircularBufferSpec(**SIZES))
    assert [group.cache_groups for group in found.spec_groups] == [(0,)]


def test_groups_in_host_memory_are_refused():
    cache = config(FullAttentionSpec(**SIZES))
    cache.kv_cache_groups[0].host_resident = True
    with pytest.raises(SpecError, match="turn HiSparse off"):
        translate.layout_of(cache, name="tiny")


def test_recurrent_layers_without_kept_states_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="serve with prefix caching on and mamba_cache_mode 'align'"):
        layout(mamba(mamba_cache_mode="none"))


def test_bytes_are_those_of_one_rank_and_padding_is_left_out():
    full, states = layout(FullAttentionSpec(**SIZES, page_size_padded=2 * PAGE), mamba()).spec_groups
    assert full.object_bytes == 2 * PAGE  # two layers
    assert states.object_bytes == 2 * (3 * 4 * 4 + 5 * 2)


@pytest.mark.parametrize(
    ("spec", "num_ranks"),
    [
        (FullAttentionSpec(**SIZES), 4),
        (FullAttentionSpec(**SIZES, max_tp_shards=2), 2),
        (FullAttentionSpec(**SIZES, max_tp_shards=3), 4),  # 4 ranks cannot hold 3 shards in equal runs
        (MLAAttentionSpec(**LATENT), 1),
        (mamba(), 4),
        (mamba(tp_replicated=True), 1),
    ],
)
def test_ranks_that_hold_equal_bytes_share_objects(spec, num_ranks):
    (group,) = layout(spec, tp=4).spec_groups
    assert group.num_ranks == num_ranks
    assert group.object_bytes == layout(spec).spec_groups[0].object_bytes


def test_pipeline_stages_hold_bytes_of_their_own():
    found = layout(FullAttentionSpec(**SIZES), MLAAttentionSpec(**LATENT), tp=2, pp=2)
    assert found.tp == 4
    assert [group.num_ranks for group in found.spec_groups] == [4, 2]


def test_a_pipeline_stage_without_a_layer_of_a_group_is_refused():
    cache = config(FullAttentionSpec(**SIZES), mamba())
    cache.kv_cache_groups[1].layer_names = []
    with pytest.raises(ConfigError, match="this pipeline stage holds no layer of it"):
        translate.layout_of(cache, name="tiny")


def test_the_draft_model_s_groups_look_ahead_by_one_block():
    specs = (FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=64))
    assert [g.lookahead for g in layout(*specs, eagle={1}, drops=True).spec_groups] == [0, 32]
    assert [g.lookahead for g in layout(*specs, drops=True).spec_groups] == [32, 32]  # none is known to be
    assert [g.lookahead for g in layout(*specs, eagle={1}, drops=False).spec_groups] == [0, 0]
    assert [g.lookahead for g in layout(*specs, eagle={1}).spec_groups] == [0, 0]


def test_layers_of_unequal_bytes_in_one_group_make_one_object():
    wide = FullAttentionSpec(**{**SIZES, "head_size": 32})
    uniform = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"model.0": FullAttentionSpec(**SIZES), "model.0.more": wide}
    )
    worker, scheduler = layout(uniform), layout(FullAttentionSpec(**SIZES))
    assert worker.spec_groups[0].object_bytes == PAGE + 2 * PAGE
    # The scheduler is told of one layer only; keys and planning are the same.
    assert worker.spec_groups[0].spec == scheduler.spec_groups[0].spec


@pytest.mark.parametrize("setting", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_with_the_reason(setting):
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, setting: 2}
    with pytest.raises(ConfigError, match=f"{setting} is 2, .*several ranks.* set it to 1"):
        translate.check_supported(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))


def test_states_are_taken_as_handed_off_and_never_by_position():
    found = layout(FullAttentionSpec(**SIZES), mamba(), mamba())
    tables = ([5, 6, 7, 8], [9, 9], [9, 9])
    offers = [(1, 40, 128), (2, 41, 128), (1, 42, 100)]
    assert translate.with_states(found, tables, offers) == ([[5, 6, 7, 8], [0, 40], [0, 41]], [128, 128])
    assert translate.with_states(found, tables, ()) == ([[5, 6, 7, 8], [], []], [])


def test_the_digest_of_memory_tells_how_kernels_cut_a_block():
    cache = config(FullAttentionSpec(**SIZES))
    whole = torch.zeros(8, 2, 32, 32)

    def digest(tensor):
        return translate.memory_digest(cache, {"model.0": tensor, "model.0.more": tensor})

    assert digest(whole) == digest(whole.clone())
    digests = {
        digest(whole),
        digest(torch.zeros(16, 2, 16, 32)),  # two kernel blocks a block
        digest(torch.zeros(8, 32, 2, 32).transpose(1, 2)),  # tokens outside of heads
        digest(whole.to(torch.bfloat16)),
    }
    assert len(digests) == 4
