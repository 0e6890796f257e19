"""Both roles of the connector side by side, called as vLLM calls them, without an engine.

One full group, blocks of 16 tokens, one layer; vLLM's own pool, requests and outputs.
"""

import logging
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from hybridkv.adapters.vllm import scheduler_role
from hybridkv.adapters.vllm.connector import HybridKVConnector
from hybridkv.adapters.vllm.messages import WorkerFacts
from hybridkv.errors import ConfigError
from hybridkv.stores.memory import MemoryStore
from vllm import SamplingParams

BLOCK, NUM_BLOCKS = 16, 64
SIZES = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}
SHA = get_hash_fn_by_name("sha256")
PROMPT = list(range(100))
TABLE = [2, 3, 4, 5, 6, 7, 8]
STORE = MemoryStore()


class OnOneStore(HybridKVConnector):
    def open_store(self, uri):  # noqa: ARG002
        return Lasting(STORE)


class Lasting:
    """The store, which outlives those who close it."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def close(self):
        """Both roles do."""


def cache(*more):
    specs = (FullAttentionSpec(**SIZES), *more)
    groups = [KVCacheGroupSpec([f"model.{idx}"], spec) for idx, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK
    )


def engine_config(extra=None, *, role="kv_both", events=False, interval=None, policy="recompute"):
    transfer = KVTransferConfig(
        kv_connector="OnOneStore",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "store": "memory://",
            "model_version": "v1",
            "slot_bytes": "64KiB",
            "pinned_share": 1,
            **(extra or {}),
        },
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True) if events else None,
        model_config=SimpleNamespace(
            model="tiny",
            hf_config=SimpleNamespace(to_dict=dict),
            dtype=torch.float32,
            quantization=None,
            revision=None,
            model_weights="",
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", cache_dtype="auto", prefix_cache_retention_interval=interval
        ),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
        ),
        speculative_config=None,
    )


class Pair:
    """A scheduler's and a worker's connector, and what vLLM does between them."""

    def __init__(self, extra=None, **config):
        self.config = engine_config(extra, **config)
        self.worker = OnOneStore(self.config, KVConnectorRole.WORKER, cache())
        self.memory = torch.rand(NUM_BLOCKS, 2, BLOCK, 8)
        self.worker.register_kv_caches({"model.0": self.memory})
        self.scheduler = OnOneStore(self.config, KVConnectorRole.SCHEDULER, cache())
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        init_none_hash(SHA)

    def close(self):
        for connector in (self.worker, self.scheduler):
            connector.shutdown()
            connector.shutdown()

    def request(self, request_id="a", tokens=PROMPT, params=None):
        extra = {"kv_transfer_params": params} if params else None
        return Request(
            request_id,
            list(tokens),
            SamplingParams(max_tokens=4, extra_args=extra),
            None,
            block_hasher=get_request_block_hasher(BLOCK, SHA),
        )

    def matched(self, request, num_computed=0):
        end_s = time.monotonic() + 30
        while True:
            found = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if found[0] is not None:
                return found
            assert found == (None, False)
            assert time.monotonic() < end_s

    def allocate(self, request, num_external, table=TABLE):
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        self.scheduler.update_state_after_alloc(request, blocks, num_external)

    def plan(self, computed=None, table=TABLE, offers=None):
        """A step in which requests compute, by id from the first to the last token."""
        computed = computed or {}
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one, num_computed_tokens=start) for one, (start, _) in computed.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={one: stop - start for one, (start, stop) in computed.items()},
            kv_connector_block_state=KVConnectorBlockState(set(computed), lambda _: (table,), offers or {}),
        )
        return self.scheduler.build_connector_meta(output)

    def work(self, meta, *, wait=True):
        """The worker's part; return what it tells the scheduler."""
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        if wait:
            assert self.worker._worker._side.drain(30)
        results = self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return output

    def step(self, **plan):
        output = self.work(self.plan(**plan))
        self.scheduler.update_connector_output(output)
        return output

    def save(self, request_id="a", tokens=PROMPT, **how):
        request = self.request(request_id, tokens, **how)
        found = self.matched(request)
        self.allocate(request, 0)
        self.step(computed={request_id: (0, len(tokens))})
        self.scheduler.request_finished_all_groups(request, (TABLE,))
        return found

    def start_load(self, request_id="b", num_tokens=96):
        request = self.request(request_id)
        assert self.matched(request) == (num_tokens, True)
        self.allocate(request, num_tokens, [20, 21, 22, 23, 24, 25])
        return request


@pytest.fixture
def make():
    STORE.discard([info.key for info in STORE.list()])
    pairs = []

    def start(*args, **config):
        pairs.append(Pair(*args, **config))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


def num_free(pair):
    return pair.pool.get_num_free_blocks()


def test_what_one_request_saved_another_one_loads(make):
    pair = make()
    free = num_free(pair)
    assert pair.save() == (0, False)
    pair.start_load()
    assert num_free(pair) == free - 6
    assert pair.scheduler.has_pending_push_work()
    output = pair.step()
    assert (output.finished_recving, output.failed_recving) == ({"b"}, set())
    assert torch.equal(pair.memory[20:26], pair.memory[2:8])
    assert num_free(pair) == free
    assert not pair.scheduler.has_pending_push_work()


def test_blocks_come_free_without_a_preemption_only_where_a_job_alone_holds_them(make):
    pair = make()
    request, blocks = pair.request(), [pair.pool.blocks[idx] for idx in TABLE]
    pair.pool.touch(blocks)  # as the request's own
    pair.matched(request)
    pair.allocate(request, 0)
    meta = pair.plan(computed={"a": (0, 100)})
    assert pair.scheduler._side.num_pinned_by_saves == 6
    assert not pair.scheduler.has_pending_block_frees()
    pair.scheduler.request_finished_all_groups(request, (TABLE,))
    pair.pool.free_blocks(blocks)
    assert pair.scheduler.has_pending_block_frees()
    pair.scheduler.update_connector_output(pair.work(meta))
    assert not pair.scheduler.has_pending_block_frees()


def test_a_producer_only_saves_and_a_consumer_only_loads(make):
    producer = make(role="kv_producer")
    producer.save()
    assert STORE.stats().objects == 6
    assert producer.matched(producer.request("b")) == (0, False)
    consumer = make(role="kv_consumer")
    consumer.save("c", [*PROMPT, *PROMPT])
    assert STORE.stats().objects == 6
    assert consumer.matched(consumer.request("b")) == (96, True)
    assert not consumer.scheduler.requires_kv_delivery


def test_a_request_opts_out_of_saving_or_loading(make):
    pair = make()
    pair.save(params={"hybridkv": {"save": False}})
    assert STORE.stats().objects == 0
    pair.save()
    for params in ({"load": False}, {"load": False, "save": False}):
        assert pair.matched(pair.request("b", params={"hybridkv": params})) == (0, False)


def test_a_request_that_cannot_be_understood_is_left_alone_with_a_warning(make, caplog):
    pair = make()
    with caplog.at_level(logging.WARNING):
        pair.save(params={"hybridkv": {"sav": False}})
    assert STORE.stats().objects == 0
    assert "did you mean 'save'" in caplog.text


def test_a_load_that_the_engine_cannot_hold_is_reported_as_failed(make):
    pair = make()
    pair.save()
    request = pair.request("b")
    assert pair.matched(request) == (96, True)
    pair.allocate(request, 96, [20, 21, 22, 0, 24, 25])
    assert pair.scheduler.has_pending_push_work()
    output = pair.step()
    assert output.finished_recving == output.failed_recving == {"b"}
    assert pair.matched(request) == (0, False)  # what was not loaded counts as absent for this request


def test_a_load_that_another_connector_serves_leaves_nothing_behind(make):
    pair = make()
    pair.save()
    free = num_free(pair)
    request = pair.request("b")
    assert pair.matched(request) == (96, True)
    pair.allocate(request, 0, [20, 21, 22, 23, 24, 25])
    assert pair.plan().plan.jobs == ()
    pair.scheduler.request_finished_all_groups(request, (TABLE,))
    assert num_free(pair) == free
    assert not pair.scheduler.has_pending_push_work()


def test_a_load_that_ended_on_the_worker_before_a_reset_fails(make):
    pair = make()
    pair.save()
    pair.start_load()
    pair.worker.bind_connector_metadata(pair.plan())
    pair.worker.wait_for_save()
    assert pair.worker._worker._side.drain(30)
    assert pair.scheduler.reset_cache() is True
    output = pair.step()
    assert output.finished_recving == output.failed_recving == {"b"}
    assert not pair.scheduler.has_pending_push_work()


def test_a_load_whose_success_was_on_its_way_at_a_reset_is_withheld_and_fails(make):
    pair = make()
    pair.save()
    free = num_free(pair)
    pair.start_load()
    output = pair.work(pair.plan())
    assert output.finished_recving == {"b"}
    pair.scheduler.reset_cache()
    pair.scheduler.update_connector_output(output)
    assert output.finished_recving == set()
    assert pair.scheduler.has_pending_push_work()
    output = pair.step()
    assert output.finished_recving == output.failed_recving == {"b"}
    assert num_free(pair) == free


def test_a_reset_leaves_the_namespace_and_other_engines_keep_theirs(make):
    pair, other = make(), make()
    pair.save()
    pair.scheduler.reset_cache()
    assert pair.matched(pair.request("b")) == (0, False)
    assert other.matched(other.request("b")) == (96, True)
    pair.save("c")
    assert pair.matched(pair.request("d")) == (96, True)
    assert STORE.stats().objects == 12


def test_two_engines_that_reset_do_not_meet(make):
    pair, other = make(), make()
    for one in (pair, other):
        one.scheduler.reset_cache()
    pair.save()
    assert other.matched(other.request("b")) == (0, False)


def test_memory_that_is_allocated_anew_is_used_from_then_on(make):
    pair = make()
    pair.save()
    memory = torch.zeros_like(pair.memory)
    pair.worker.register_kv_caches({"model.0": memory})
    pair.start_load()
    assert pair.step().failed_recving == set()
    assert torch.equal(memory[20:26], pair.memory[2:8])


def test_a_job_under_way_while_memory_is_allocated_anew_is_still_reported(make):
    pair = make()
    pair.save()
    free = num_free(pair)
    pair.start_load()
    output = pair.work(pair.plan(), wait=False)
    pair.worker.register_kv_caches({"model.0": torch.zeros_like(pair.memory)})
    pair.scheduler.update_connector_output(output)
    recving = output.finished_recving | pair.step().finished_recving
    assert recving == {"b"}
    assert num_free(pair) == free


def test_workers_whose_memory_lies_otherwise_share_nothing(make):
    pair, other = make(), make()
    other.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerFacts(memory="otherwise")})
    pair.save()
    assert other.matched(other.request("b")) == (0, False)


def test_another_connector_s_handshake_is_left_alone(make):
    pair = make()
    before = pair.scheduler._scheduler._scheme.manifest
    pair.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    assert pair.scheduler._scheduler._scheme.manifest == before


def test_a_bug_in_planning_leaves_the_request_alone_and_the_engine_alive(make, monkeypatch):
    pair = make()
    request = pair.request()

    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(pair.scheduler._side, "ask", fail)
    assert pair.scheduler.get_num_new_matched_tokens(request, 32) == (0, False)
    monkeypatch.undo()
    assert pair.matched(request) == (0, False)
    pair.allocate(request, 0)
    monkeypatch.setattr(pair.scheduler._side, "advanced", fail)
    assert pair.plan(computed={"a": (0, 100)}).plan.jobs == ()
    assert pair.scheduler._scheduler.num_errors == 2
    assert pair.scheduler.get_kv_connector_stats().data["errors"] == {"": 2}


def test_hashes_that_are_not_what_the_namespace_says_are_never_stored(make, monkeypatch, caplog):
    pair = make()
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another")
    with caplog.at_level(logging.ERROR):
        pair.save()
    assert STORE.stats().objects == 0
    assert "nothing is saved or loaded" in caplog.text


def test_a_synchronous_lookup_answers_at_once(make):
    pair = make({"lookup_async": False})
    pair.save()
    assert pair.scheduler.get_num_new_matched_tokens(pair.request("b"), 0) == (96, True)


def test_output_is_saved_where_asked_for(make):
    pair = make({"save_decode_cache": True})
    request = pair.request()
    assert pair.matched(request) == (0, False)
    pair.allocate(request, 0)
    pair.step(computed={"a": (0, 100)})
    assert STORE.stats().objects == 6
    request.append_output_token_ids(list(range(30)))  # 130 tokens: 8 blocks
    request.num_computed_tokens = 129
    table = [*TABLE, 9]
    pair.step(computed={"a": (128, 129)}, table=table)
    assert STORE.stats().objects == 8
    pair.scheduler.request_finished_all_groups(request, (table,))
    pair.step()
    assert not pair.scheduler.has_pending_push_work()


# ---- what is told


def external(hashes):
    """Block hashes as vLLM publishes them."""
    return [maybe_convert_block_hash(one) for one in hashes]


def test_stored_objects_are_announced_once_with_hash_parent_group_and_size(make):
    pair = make(events=True)
    request = pair.request()
    pair.save()
    (event,) = pair.scheduler.take_events()
    assert event.block_hashes == external(request.block_hashes)
    assert (event.parent_block_hash, event.block_size, event.group_idx) == (None, BLOCK, 0)
    assert (event.kv_cache_spec_kind, event.medium) == ("full_attention", "STORAGE")
    assert list(pair.scheduler.take_events()) == []


def test_later_objects_name_the_one_before_as_their_parent(make):
    pair = make(events=True)
    request = pair.request()
    pair.matched(request)
    pair.allocate(request, 0)
    pair.step(computed={"a": (0, 40)})
    pair.step(computed={"a": (40, 100)})
    first, second = pair.scheduler.take_events()
    assert first.block_hashes == external(request.block_hashes[:2])
    assert second.block_hashes == external(request.block_hashes[2:])
    assert [second.parent_block_hash] == external(request.block_hashes[1:2])


def test_nothing_is_gathered_for_an_engine_without_events(make):
    pair = make()
    pair.save()
    assert list(pair.scheduler.take_events()) == []


def test_both_roles_tell_what_was_added_since_they_last_did(make):
    pair = make()
    pair.save()
    pair.start_load()
    pair.step()
    stats = OnOneStore.build_kv_connector_stats(pair.worker.get_kv_connector_stats().to_dict())
    assert stats.data["store_results"] == {"put stored": 6, "get ok": 6}
    assert stats.data["store_bytes"]["put"] == 6 * 2 * BLOCK * 8 * 4
    both = stats.aggregate(pair.scheduler.get_kv_connector_stats())
    assert both.data["hit_tokens"] == {"": 96}
    assert both.data["lookups"] == {"exact": 2}
    assert both.reduce()["store_results_get_ok"] == 6
    assert pair.worker.get_kv_connector_stats() is None
    assert pair.scheduler.get_kv_connector_stats() is None


def test_counters_add_up_and_gauges_are_the_latest():
    first = OnOneStore.build_kv_connector_stats({"loads": {"": 1}, "jobs": {"0": 5, "1": 2}})
    second = OnOneStore.build_kv_connector_stats({"loads": {"": 2}, "jobs": {"0": 1}})
    assert first.aggregate(second).data == {"loads": {"": 3}, "jobs": {"0": 1, "1": 2}}
    first.reset()
    assert first.is_empty()


# ---- start


def test_a_store_that_two_processes_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="memory store of their own"):
        HybridKVConnector(engine_config(), KVConnectorRole.WORKER, cache())


def test_a_failure_at_start_closes_the_store(monkeypatch):
    closed = []
    monkeypatch.setattr(Lasting, "close", lambda _: closed.append(1))
    with pytest.raises(ConfigError, match="retention 5 is not a multiple"):
        OnOneStore(engine_config({"retention": 5}), KVConnectorRole.SCHEDULER, cache())
    assert closed == [1]


def states(**changes):
    return MambaSpec(
        block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align", **changes
    )


@pytest.mark.parametrize(
    ("interval", "warned"), [(0, "only at the ends of prompts"), (64, "every 64 tokens")]
)
def test_an_interval_that_costs_hits_on_recurrent_layers_is_warned_of(interval, warned, caplog):
    with caplog.at_level(logging.WARNING):
        made = OnOneStore(engine_config(interval=interval), KVConnectorRole.SCHEDULER, cache(states()))
    made.shutdown()
    assert warned in caplog.text
    assert "set it to None" in caplog.text


@pytest.mark.parametrize(
    ("interval", "more"), [(None, states()), (0, SlidingWindowSpec(**SIZES, sliding_window=32))]
)
def test_an_interval_that_costs_nothing_is_not(interval, more, caplog):
    with caplog.at_level(logging.WARNING):
        OnOneStore(engine_config(interval=interval), KVConnectorRole.SCHEDULER, cache(more)).shutdown()
    assert "interval" not in caplog.text


def test_a_policy_that_ends_requests_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        OnOneStore(engine_config(policy="fail"), KVConnectorRole.SCHEDULER, cache()).shutdown()
    assert 'set kv_load_failure_policy="recompute"' in caplog.text


def test_each_step_makes_tables_only_for_what_may_be_saved(make, monkeypatch):
    """A decoding request costs no table, whatever its length."""
    pair, made = make(), []
    pair.save()
    request = pair.request("b", [*PROMPT[:40]])
    pair.matched(request)
    pair.allocate(request, 0)
    pair.step(computed={"b": (0, 40)})
    monkeypatch.setattr(KVConnectorBlockState, "get_block_ids", lambda _, request_id: made.append(request_id))
    for stop in range(41, 60):
        pair.step(computed={"b": (stop - 1, stop)})
    assert made == []


@pytest.mark.parametrize(("version", "warned"), [("0.32.1", False), ("0.41.0", True)])
def test_a_vllm_that_nobody_tried_is_warned_of(version, warned, caplog, monkeypatch):
    monkeypatch.setattr(scheduler_role, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        OnOneStore(engine_config(), KVConnectorRole.SCHEDULER, cache()).shutdown()
    assert ("hybridkv was tested with" in caplog.text) == warned
