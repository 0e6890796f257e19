"""hybridkv in a real vLLM engine on the CPU: outputs beside those of an engine without it.

Two engines run one after the other in this process. The first knows no connector: its outputs are what every
other run must give.
"""

import ctypes
import gc
import os
import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

os.environ.update(  # read when vLLM is imported and when an engine starts
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from tests.vllm.tiny_models import VOCABULARY, write_gemma3
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SinkFullAttentionSpec,
)

from hybridkv.adapters.vllm.connector import ConnectorSettings, HybridKVConnector
from hybridkv.adapters.vllm.translate import layout_of
from hybridkv.errors import ConfigError, SpecError, TransferError
from hybridkv.keys import spec_group_of
from hybridkv.plan.load import plan_load
from hybridkv.stores.base import GetResult
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers.base import StoreWrapper
from hybridkv.transfer.block_io import NumpyBlockIO
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.filterwarnings("default:::vllm")  # its own affair

BLOCK = 32
TOLERANCE = 1e-4
"""Of log probabilities: a hit changes the shapes of the steps, and with them the order of sums."""
SAMPLING = SamplingParams(detokenize=False, temperature=0, logprobs=5, ignore_eos=True, max_tokens=16)


def prompt(seed, num_tokens=2000):
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


FIRST = prompt(1)
SIBLING = FIRST[:1000] + prompt(2, 1000)
SHORT = prompt(3, 700)
PROMPTS = {
    "first": FIRST,
    "half": FIRST[:1000],
    "sibling": SIBLING,
    "short": SHORT,
    "long": FIRST[:1500] + prompt(4, 900),
}


class SharedStore(StoreWrapper):
    """One store for both connector roles, which outlives them; it can be told to misbehave.

    Attributes:
        wrong_group: spec group whose objects are served as zeros.
        missing: whether ``get`` finds nothing, though ``contains`` did.
        may_get: cleared while ``get`` shall hang.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.wrong_group = None
        self.missing = False
        self.may_get = threading.Event()
        self.may_get.set()

    def get(self, keys, targets):
        assert self.may_get.wait(60)
        if self.missing:
            return [GetResult.ABSENT] * len(keys)
        results = self._inner.get(keys, targets)
        for key, segments in zip(keys, targets, strict=True):
            if spec_group_of(key) == self.wrong_group:
                for address, num_bytes in segments:
                    ctypes.memset(address, 0, num_bytes)
        return results

    def close(self):
        """The connectors of both roles close what they opened."""


STORE = SharedStore(MemoryStore())


class SharedStoreConnector(HybridKVConnector):
    def open_store(self, uri):  # noqa: ARG002
        return STORE


@contextmanager
def serving(model, **settings):
    """An engine in this process, taken down completely afterwards."""
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        enable_prefix_caching=True,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        disable_hybrid_kv_cache_manager=False,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass
class Run:
    tokens: list[int]
    logprobs: list[dict[int, float]] = field(repr=False)
    cached: int

    def assert_equals(self, other):
        assert self.tokens == other.tokens
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            common = mine.keys() & theirs.keys()
            assert len(common) >= 4  # of 5: the last place may be a tie
            assert {token: mine[token] for token in common} == pytest.approx(
                {token: theirs[token] for token in common}, abs=TOLERANCE, rel=0
            )

    def differs(self, other):
        try:
            self.assert_equals(other)
        except AssertionError:
            return True
        return False


def run(llm, *prompts):
    """Serve prompts together."""
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], SAMPLING, use_tqdm=False)
    return [
        Run(
            tokens=list(one.outputs[0].token_ids),
            logprobs=[
                {token: found.logprob for token, found in place.items()} for place in one.outputs[0].logprobs
            ],
            cached=one.num_cached_tokens,
        )
        for one in outputs
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("gemma3")
    write_gemma3(path)
    return path


@pytest.fixture(scope="module")
def cold(model):
    """What an engine without a connector answers, by prompt."""
    with serving(model) as llm:
        runs = {}
        for name, tokens in PROMPTS.items():
            runs[name] = run(llm, tokens)[0]
            assert runs[name].cached == 0
            assert llm.reset_prefix_cache()
        return runs


class Bench:
    """The engine with hybridkv, and what a test looks at inside of it."""

    def __init__(self, llm):
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.side = self.scheduler.connector._side
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()

    def settle(self):
        """Step until nothing is left to do, not even a save."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        assert self.pool.get_num_free_blocks() == self.free_at_start

    def run(self, *names, device_cache=False):
        """Serve prompts, of which the engine itself remembers nothing."""
        self.settle()
        if not device_cache:
            assert self.llm.reset_prefix_cache()
        runs = run(self.llm, *(PROMPTS[name] for name in names))
        self.settle()
        return runs if len(runs) > 1 else runs[0]


@pytest.fixture(scope="module")
def engine(cold, model):  # noqa: ARG001 - one engine at a time
    transfer = KVTransferConfig(
        kv_connector="SharedStoreConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": "memory://", "model_version": "tiny gemma3"},
    )
    with serving(model, kv_transfer_config=transfer) as llm:
        yield Bench(llm)


@pytest.fixture
def bench(engine):
    """The engine beside an empty store."""
    STORE.discard([found.key for found in STORE.list()])
    yield engine
    STORE.wrong_group, STORE.missing = None, False
    STORE.may_get.set()
    engine.settle()


def test_a_prompt_that_nobody_saved_is_computed_and_saved(bench, cold):
    found = bench.run("first")
    assert found.cached == 0
    found.assert_equals(cold["first"])
    assert STORE.stats().objects == 2 * (2000 // BLOCK)  # windows, kept at every boundary, and full attention


def test_the_same_prompt_again_is_loaded(bench, cold):
    bench.run("first")
    found = bench.run("first")
    assert found.cached == 1984
    found.assert_equals(cold["first"])


def test_an_external_hit_equals_a_local_one_bit_for_bit(bench):
    bench.run("first")
    local = bench.run("first", device_cache=True)
    before = bench.side.counters.hit_tokens
    external = bench.run("first")
    assert bench.side.counters.hit_tokens - before == local.cached == external.cached == 1984
    assert external.tokens == local.tokens
    assert external.logprobs == local.logprobs


def test_a_prompt_that_shares_half_of_another_loads_that_half(bench, cold):
    bench.run("first")
    found = bench.run("sibling")
    assert found.cached >= 960
    found.assert_equals(cold["sibling"])


def test_a_load_continues_what_the_device_holds(bench, cold):
    bench.run("first")
    bench.run("half")
    before = bench.side.counters.hit_tokens
    found = bench.run("long", device_cache=True)
    assert found.cached == 1472
    assert bench.side.counters.hit_tokens - before == 1472 - 992
    found.assert_equals(cold["long"])


def test_prompts_that_are_served_together_load_together(bench, cold):
    bench.run("first")
    names = ["first", "sibling", "short", "long", "first"]
    found = bench.run(*names)
    assert [one.cached > 0 for one in found] == [True, True, False, True, True]
    for name, one in zip(names, found, strict=True):
        one.assert_equals(cold[name])


@pytest.mark.parametrize("spec_group", [0, 1])
def test_wrong_bytes_in_one_group_show(bench, cold, spec_group):
    """The control: what the other tests compare does depend on the bytes of each group."""
    bench.run("first")
    STORE.wrong_group = spec_group
    found = bench.run("first")
    assert found.cached == 1984
    assert found.differs(cold["first"])


def test_a_load_that_fails_is_computed_instead(bench, cold):
    bench.run("first")
    failed = bench.side.counters.loads_failed
    STORE.missing = True
    found = bench.run("first", "short")
    assert bench.side.counters.loads_failed > failed
    found[0].assert_equals(cold["first"])
    found[1].assert_equals(cold["short"])


def test_a_load_whose_bytes_do_not_reach_the_blocks_is_computed_instead(bench, cold, monkeypatch):
    tries = []

    def fail(*args):
        tries.append(args)
        raise TransferError("told to fail")

    bench.run("first")
    monkeypatch.setattr(NumpyBlockIO, "scatter", fail)
    bench.run("first").assert_equals(cold["first"])
    assert len(tries) == 1


def test_a_load_that_would_leave_blocks_unfilled_is_computed_instead(bench, cold, monkeypatch):
    def plan_less(*args, **prefixes):
        return tuple(range(load.start, load.stop - 1) for load in plan_load(*args, **prefixes))

    bench.run("first")
    unfilled = bench.side.counters.unfilled_blocks
    monkeypatch.setattr("hybridkv.service.scheduler.plan_load", plan_less)
    bench.run("first").assert_equals(cold["first"])
    assert bench.side.counters.unfilled_blocks > unfilled


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing_behind(bench, cold):
    bench.run("first")
    bench.llm.reset_prefix_cache()
    STORE.may_get.clear()
    engine = bench.llm.llm_engine
    request_id = engine.add_request("aborted", {"prompt_token_ids": FIRST}, SAMPLING)
    while not bench.side.num_pinned:
        engine.step()
    engine.abort_request([request_id], internal=True)
    for _ in range(20):
        engine.step()
    assert bench.pool.get_num_free_blocks() < bench.free_at_start  # the load could still write them
    STORE.may_get.set()
    bench.settle()
    bench.run("first").assert_equals(cold["first"])


def test_blocks_are_held_until_their_save_is_staged(bench, cold, monkeypatch):
    may_gather = threading.Event()
    gather = NumpyBlockIO.gather

    def slow_gather(self, *args):
        assert may_gather.wait(60)
        gather(self, *args)

    monkeypatch.setattr(NumpyBlockIO, "gather", slow_gather)
    bench.llm.reset_prefix_cache()
    run(bench.llm, FIRST)[0].assert_equals(cold["first"])
    for _ in range(20):
        bench.llm.llm_engine.step()
    assert bench.scheduler.has_requests()
    assert (
        3 * (2000 // BLOCK) == bench.side.num_pinned == bench.free_at_start - bench.pool.get_num_free_blocks()
    )
    # Others take what is free meanwhile, and must not get those blocks.
    run(bench.llm, PROMPTS["long"])[0].assert_equals(cold["long"])
    may_gather.set()
    bench.settle()
    found = bench.run("first")
    assert found.cached == 1984
    found.assert_equals(cold["first"])


def test_a_group_of_an_unknown_kind_is_refused_by_name():
    sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["model.0"], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec(["model.1"], SinkFullAttentionSpec(**sizes, sink_len=4)),
    ]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(SpecError, match=r"cache group 1 \(SinkFullAttentionSpec: model\.1.* its sink tokens"):
        layout_of(config, name="tiny")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"store": "memory://", "model_versoin": "1"}, "unknown key 'model_versoin'; did you mean"),
        ({"model_version": "1"}, "store is missing"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message):
        ConnectorSettings.of(extra)
