"""Several real vLLM engines on one store: alike, unlike, of other ranks, killed in the middle of a save."""

import shutil
import signal
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.vllm.engines import EngineProcess, open_store
from tests.vllm.test_engine_models import FIRST, PROMPTS
from tests.vllm.tiny_models import write_model
from tests.vllm.trial_store import install, trial_uri

from hybridkv.stores.local.store import LocalStore
from hybridkv.stores.mooncake.trial import TrialCluster

WHOLE = 1984


@pytest.fixture
def local():
    """A directory of a local store."""
    path = Path(tempfile.mkdtemp(prefix="hybridkv-test-", dir="/dev/shm"))
    yield path / "store"
    shutil.rmtree(path)


@pytest.fixture
def uri(local):
    return f"local://{local}?capacity=96MiB"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of one basename, by what is special about them."""
    directory = tmp_path_factory.mktemp("models")

    def write(what, kind="gpt_oss", **settings):
        write_model(kind, directory / what / "model", **settings)

    write("first")
    write("other weights", seed=1)
    write("gemma3", kind="gemma3")
    write("rope", kind="llama")
    write(
        "other rope",
        kind="llama",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    )
    return {path.name: path / "model" for path in directory.iterdir()}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A directory that makes the trial store known to processes that have it on their path."""
    return install(tmp_path_factory.mktemp("plugin") / "path")


@pytest.fixture(scope="module")
def process(plugin, tmp_path_factory):
    """A process for engines that are stopped in good order; the next one replaces the one before."""
    with EngineProcess(tmp_path_factory.mktemp("engine") / "log", PYTHONPATH=str(plugin)) as process:
        yield process


@pytest.fixture(scope="module")
def plain(models, process):
    """What engines without a connector answer to the first prompt, by model and type."""
    runs = {}
    for name, model in models.items():
        for dtype in ("float32", "bfloat16") if name == "first" else ("float32",):
            process.start(model, dtype=dtype)
            runs[name, dtype] = process.run(FIRST)[0]
    return runs


@pytest.fixture
def begin(tmp_path):
    """Makes engine processes, which end with the test."""
    with ExitStack() as stack:

        def make(name, **environment):
            return stack.enter_context(EngineProcess(tmp_path / f"{name}.log", **environment))

        yield make


def test_models_that_differ_in_anything_find_nothing_of_each_other(process, models, uri, plain):
    """One after the other on one store; the files of a model are all that tells one from another."""
    for (name, dtype), expected in plain.items():
        process.start(models[name], uri, dtype=dtype)
        (cold,) = process.run_afresh(FIRST)
        assert cold.cached == 0, name
        cold.assert_equals(expected)
        assert process.run_afresh(FIRST)[0].cached == WHOLE
    for (name, dtype), expected in plain.items():
        process.start(models[name], uri, dtype=dtype)
        (warm,) = process.run_afresh(FIRST)
        assert warm.cached == WHOLE, name
        if dtype == "float32":
            warm.assert_equals(expected)


def test_other_weights_under_the_old_name_find_nothing(process, models, uri, plain, tmp_path):
    served = tmp_path / "model"
    for name in ("first", "other weights"):
        shutil.copytree(models[name], served, dirs_exist_ok=True)
        process.start(served, uri)
        (cold,) = process.run_afresh(FIRST)
        assert cold.cached == 0
        cold.assert_equals(plain[name, "float32"])


def test_engines_of_one_and_of_two_ranks_each_find_only_their_own(process, models, uri, plain):
    model, expected = models["first"], plain["first", "float32"]
    process.start(model, uri)
    process.run_afresh(FIRST)[0].assert_equals(expected)
    process.start(model, uri, tensor_parallel_size=2, distributed_executor_backend="mp")
    (cold,) = process.run_afresh(FIRST)
    assert cold.cached == 0
    cold.assert_equals(expected)
    (warm,) = process.run_afresh(FIRST)
    assert warm.cached == WHOLE
    warm.assert_equals(expected)
    process.start(model, uri)
    (found,) = process.run_afresh(FIRST)
    assert found.cached == WHOLE
    found.assert_equals(expected)


def wait_until_unchanged(store, least):
    """Wait until a store holds so many objects and gets no more."""
    deadline, before = time.monotonic() + 60, -1
    while (now := store.stats().objects) < least or now != before:
        assert time.monotonic() < deadline, f"{now} objects are stored"
        before = now
        time.sleep(0.3)


def test_what_one_engine_saves_another_one_loads(begin, models, uri, plain):
    """Scheduler and worker are in a process of their own, apart from the one that takes requests."""
    expected = plain["first", "float32"]
    one, two = (begin(name, VLLM_ENABLE_V1_MULTIPROCESSING="1") for name in ("one", "two"))
    for engine in (one, two):
        engine.start(models["first"], uri)
    one.run(FIRST)[0].assert_equals(expected)
    with closing(open_store(uri)) as store:
        wait_until_unchanged(store, 2 * (2000 // 32))
    (found,) = two.run(FIRST)
    assert found.cached == WHOLE
    found.assert_equals(expected)
    # Both at once, each with a prompt that the other one serves, too.
    for engine in (one, two):
        engine.do("reset")
        engine.send("run", (PROMPTS["sibling"], PROMPTS["first"]))
    for engine in (one, two):
        sibling, first = engine.receive()
        assert sibling["cached"] >= 960
        assert first["cached"] == WHOLE
        assert first["tokens"] == expected.tokens


@pytest.mark.parametrize("kill_at", [1, 70])
def test_an_engine_that_is_killed_in_a_save_leaves_only_right_bytes(
    begin, process, plugin, models, local, uri, plain, kill_at
):
    """Of 124 payloads one is half reported: its bytes are in the store, and nobody said so."""
    expected = plain["first", "float32"]
    dying = begin("dying", PYTHONPATH=str(plugin))
    dying.start(models["first"], trial_uri(uri, kill_at=kill_at))
    dying.send("run", (FIRST,))
    assert dying.wait() == -signal.SIGKILL
    process.start(models["first"], uri)
    first = process.run_afresh(FIRST)[0]
    assert first.cached < WHOLE
    first.assert_equals(expected)
    again = process.run_afresh(FIRST)[0]
    assert again.cached == WHOLE
    again.assert_equals(expected)
    process.do("stop")
    with closing(LocalStore(local)) as store:
        report = store.check()
        assert report.objects > 0
        assert (report.num_errors, report.reserved_objects) == (0, 0)


def test_a_store_that_dies_between_lookup_and_load_costs_only_time(process, models, plain, tmp_path):
    expected = plain["first", "float32"]
    gate = tmp_path / "gate"
    with closing(TrialCluster(tmp_path, segment_bytes=128 << 20)) as cluster:
        process.start(models["first"], trial_uri(cluster.uri, gate=gate))
        process.run_afresh(FIRST)[0].assert_equals(expected)
        assert process.run_afresh(FIRST)[0].cached == WHOLE
        process.do("reset")
        gate.touch()
        process.do("submit", "caught", FIRST)
        process.do("step_until_loading")
        for dead in (*cluster.nodes, cluster.master):
            dead.kill()
            dead.wait()
        gate.unlink()
        (caught,) = process.outputs("finish")
        assert caught.cached == 0
        caught.assert_equals(expected)
        # And without the store the next ones are served, too.
        process.do("reset")
        process.run(PROMPTS["first"])[0].assert_equals(expected)
