"""hybridkv in real vLLM engines with models of each kind, beside engines without it.

Stored bytes are looked at and spoilt from this process, through a client of its own.
"""

import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.vllm.engines import TOLERANCE, EngineProcess, Run, clear, open_store, spec_groups, spoil
from tests.vllm.tiny_models import VOCABULARY, write_model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is expected of it.

    Attributes:
        kind: of ``tiny_models``.
        num_groups: spec groups.
        whole: tokens of a prompt of 2,000 that a second request for it does not compute.
        half: the least for a prompt that shares its first 1,000 tokens.
        dtype: of weights and cache.
        settings: of the engine, where vLLM's defaults do not do.
        repeats: whether vLLM itself gives equal outputs for a prompt computed at once and in other steps.
        together: how far log probabilities of prompts served together may lie from those of each alone.
            In half precision vLLM's own hits lie up to 0.03 away: the sums depend on who is in a step, and
            that depends on when a load ends.
    """

    kind: str
    num_groups: int
    whole: int = 1984
    half: int = 960
    dtype: str = "float32"
    settings: dict = field(default_factory=dict)
    repeats: bool = True
    together: float = TOLERANCE


CASES = [
    Case(kind="llama", num_groups=1),
    Case(kind="gemma3", num_groups=2),
    Case(kind="gpt_oss", num_groups=2),
    Case(kind="cohere2", num_groups=2),
    Case(
        kind="qwen3_next",
        num_groups=2,
        half=512,
        dtype="bfloat16",
        together=0.1,
        settings={
            "enable_prefix_caching": True,  # by default off
            "max_num_batched_tokens": 512,  # a state is kept where a step ends
            "prefix_cache_retention_interval": None,  # else only the last one is
        },
    ),
    Case(
        kind="deepseek_v2",
        num_groups=1,
        half=992,
        settings={
            "block_size": 16,
            "attention_config": {"backend": "CPU_MLA"},  # the one that runs on every CPU
            "enable_prefix_caching": True,
        },
        repeats=False,
    ),
]
STEP_TOKENS = {"local": None, "mooncake": 512}
"""Tokens of a step: vLLM's default, which takes a prompt at once, and prompts in chunks."""


def tokens(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


FIRST = tokens(1, 2000)
PROMPTS = {
    "first": FIRST,
    "sibling": FIRST[:1000] + tokens(2, 1000),
    "short": tokens(3, 700),
    "long": FIRST[:1500] + tokens(4, 900),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.kind)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    path = tmp_path_factory.mktemp(case.kind)
    write_model(case.kind, path, dtype=case.dtype)
    return path


@pytest.fixture(scope="module")
def process(model):
    with EngineProcess(model / "log") as process:
        yield process


@pytest.fixture(scope="module")
def plain(process, model, case):
    """What an engine without a connector answers, by prompt."""
    process.start(model, dtype=case.dtype, **case.settings)
    runs = {name: process.run_afresh(prompt)[0] for name, prompt in PROMPTS.items()}
    process.do("stop")
    assert [one.cached for one in runs.values()] == [0] * len(runs)
    return runs


class Served:
    """The engine with hybridkv on a store."""

    def __init__(self, process, store, plain, case):
        self.process, self.store, self.plain, self.case = process, store, plain, case
        self._cold = None

    def cold(self):
        """A run of the first prompt with nothing stored; it is stored then."""
        if self._cold is None:
            clear(self.store)
            self.process.do("reset")
            self._cold = self.process.do("run_and_read", FIRST)
            self.process.do("settle")
        return self._cold

    def afresh(self, *names):
        """Serve prompts of which only the store remembers something."""
        return self.process.run_afresh(*(PROMPTS[name] for name in names))

    def assert_right(self, found, name, tolerance=TOLERANCE):
        """Compare an output with that of the engine without a connector."""
        if self.case.repeats:
            found.assert_equals(self.plain[name], tolerance)

    def spoil(self, spec_group):
        """Make the store serve zeros for a group, to the next ``cold``."""
        self.cold()
        self._cold = None
        assert spoil(self.store, spec_group) > 0


@pytest.fixture(scope="module", params=["local", "mooncake"])
def served(request, process, model, case, plain):
    directory = Path(tempfile.mkdtemp(prefix="hybridkv-test-", dir="/dev/shm"))
    if request.param == "local":
        uri = f"local://{directory}?capacity=96MiB"
    else:
        uri = request.getfixturevalue("cluster").uri
    settings = dict(case.settings)
    if (step_tokens := STEP_TOKENS[request.param]) is not None:
        settings["max_num_batched_tokens"] = step_tokens
    process.start(model, uri, extra={"model_version": case.kind}, dtype=case.dtype, **settings)
    store = open_store(uri)
    yield Served(process, store, plain, case)
    process.do("stop")
    clear(store)
    store.close()
    shutil.rmtree(directory)


def run_of(read):
    return Run(**read["output"])


def test_a_prompt_that_nobody_saved_is_computed_and_saved(served, case):
    cold = run_of(served.cold())
    assert cold.cached == 0
    cold.assert_equals(served.plain["first"])
    assert spec_groups(served.store) == set(range(case.num_groups))


def test_what_the_engine_holds_itself_is_not_loaded(served, case):
    served.afresh("first")
    (found,) = served.process.run(FIRST)
    assert found.cached == case.whole
    served.assert_right(found, "first")


def test_the_prompt_again_is_loaded(served, case):
    served.cold()
    (found,) = served.afresh("first")
    assert found.cached == case.whole
    served.assert_right(found, "first")


def test_an_external_hit_equals_a_local_one_bit_for_bit(served):
    served.cold()
    (external,) = served.afresh("first")
    (local,) = served.process.run(FIRST)
    assert external.cached == local.cached > 0
    assert (external.tokens, external.logprobs) == (local.tokens, local.logprobs)


def test_a_prompt_that_shares_half_of_another_loads_that_half(served, case):
    served.cold()
    (found,) = served.afresh("sibling")
    assert 1000 >= found.cached >= case.half
    served.assert_right(found, "sibling")


def test_prompts_that_are_served_together_load_together(served, case):
    served.cold()
    names = ["first", "sibling", "short", "long", "first"]
    found = served.afresh(*names)
    assert all(one.cached > 0 for name, one in zip(names, found, strict=True) if name != "short")
    for name, one in zip(names, found, strict=True):
        served.assert_right(one, name, case.together)


def changed_layers(read, other, hit):
    """Layers in which two runs hold other bytes below the hit; each layer has a block in both."""
    changed = set()
    for layer, blocks in read["blocks"].items():
        common = [place for place in blocks.keys() & other["blocks"][layer].keys() if place < hit]
        assert common, layer
        if any(blocks[place] != other["blocks"][layer][place] for place in common):
            changed.add(layer)
    return changed


def test_the_loaded_bytes_are_those_that_were_computed(served, case):
    cold = served.cold()
    served.process.do("reset")
    loaded = served.process.do("run_and_read", FIRST)
    assert loaded["output"]["cached"] == case.whole
    assert not changed_layers(loaded, cold, case.whole // served.process.do("facts")["block_sizes"][0])


def test_wrong_bytes_in_one_group_show(served, case):
    """The control: outputs and bytes do depend on each group, and each layer is of one group."""
    layers = []
    for spec_group in range(case.num_groups):
        cold = served.cold()
        served.spoil(spec_group)
        served.process.do("reset")
        loaded = served.process.do("run_and_read", FIRST)
        assert loaded["output"]["cached"] == case.whole
        if case.repeats:
            assert run_of(loaded).differs(served.plain["first"])
        block_size = served.process.do("facts")["block_sizes"][0]
        layers.append(changed_layers(loaded, cold, case.whole // block_size))
    assert all(layers)
    assert sum(map(len, layers)) == len(set().union(*layers)) == len(cold["blocks"])
