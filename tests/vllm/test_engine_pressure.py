"""A real vLLM engine with few blocks, many requests and a slow store."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.vllm.engines import EngineProcess, Run
from tests.vllm.tiny_models import VOCABULARY, write_model
from tests.vllm.trial_store import install, trial_uri

NUM_REQUESTS = 200
PINNED_SHARE = 0.25
SETTINGS = {
    "kv_cache_memory_bytes": 3 << 20,  # of prompts of 300 tokens a handful
    "max_num_batched_tokens": 512,
    "max_model_len": 640,
    "max_num_seqs": 24,
}


def prompts():
    """Prompts of which some begin alike, so that some are loaded while others are saved."""
    rng = random.Random(5)

    def tokens(count):
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    starts = [tokens(192) for _ in range(12)]
    return [
        rng.choice(starts)[: rng.choice([0, 96, 192])] + tokens(rng.randrange(40, 300))
        for _ in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def directory():
    path = Path(tempfile.mkdtemp(prefix="hybridkv-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module", params=["gemma3"])
def watched(request, directory, tmp_path_factory):
    """What an engine answers without a connector, and what one did with hybridkv, first cold, then warm."""
    model = tmp_path_factory.mktemp(request.param)
    write_model(request.param, model)
    uri = trial_uri(f"local://{directory}/{request.param}?capacity=128MiB", put_ms=20)
    plugin = install(tmp_path_factory.mktemp("plugin") / "path")
    asked = prompts()
    with EngineProcess(model / "log", PYTHONPATH=str(plugin)) as process:
        process.start(model, **SETTINGS)
        plain = process.do("run_watched", asked, max_tokens=80)
        process.start(model, uri, extra={"pinned_share": PINNED_SHARE}, **SETTINGS)
        cold = process.do("run_watched", asked, max_tokens=80)
        process.do("reset")
        warm = process.do("run_watched", asked, max_tokens=80)
        process.do("stop")
    return plain, cold, warm


def test_outputs_are_right_while_requests_are_preempted_and_saves_are_slow(watched):
    plain, *others = watched
    assert sum(seen["preempted"] for seen in others) > 0
    for seen in others:
        assert len(seen["outputs"]) == NUM_REQUESTS
        for mine, expected in zip(seen["outputs"], plain["outputs"], strict=True):
            Run(**mine).assert_equals(Run(**expected))


def test_pins_keep_within_their_budget(watched):
    """That all blocks are free again afterwards is what each run ends with."""
    _, *others = watched
    for seen in others:
        assert 0 < seen["most_pinned"] <= PINNED_SHARE * seen["num_blocks"]


def test_what_was_saved_under_pressure_is_loaded(watched):
    _, cold, warm = watched
    cached = [sum(one["cached"] for one in seen["outputs"]) for seen in (cold, warm)]
    assert cached[1] > cached[0], cached
