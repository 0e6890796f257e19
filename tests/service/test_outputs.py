"""A hit never changes the model's output: the reference engine with hybridkv beside the same without."""

import ctypes
import random
import threading

import numpy as np
import pytest

from hybridkv.clock import ManualClock
from hybridkv.keys import spec_group_of
from hybridkv.service.settings import SchedulerSettings
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.wrappers import Fault, FaultyStore, LatencyStore
from hybridkv.testing.reference_connector import ServiceConnector
from hybridkv.testing.reference_engine import Engine, NoConnector
from hybridkv.testing.reference_model import VOCABULARY, EngineMemory, Model, reference_group
from hybridkv.transfer.moves import MoverSettings

FULL = reference_group("full", Full(block_size=8), layers=2)
WINDOW = reference_group("window", SlidingWindow(block_size=4, window=10))
CHUNKS = reference_group("chunks", ChunkedLocal(block_size=4, chunk=16))
STATES = reference_group("states", Recurrent(block_size=8))
LATENTS = reference_group("latents", MLA(block_size=16))
DRAFT = reference_group("draft", SlidingWindow(block_size=8, window=12), lookahead=8)

MIXES = {
    "full": (FULL,),
    "full, window": (FULL, WINDOW),
    "full, chunks": (FULL, CHUNKS),
    "full, states": (FULL, STATES),
    "latents, window, draft": (LATENTS, WINDOW, DRAFT),
    "window, states": (WINDOW, STATES),
    "all kinds": (FULL, WINDOW, CHUNKS, STATES, LATENTS),
}
MOVER = MoverSettings(slot_bytes=1 << 16, num_slots=2, backoff_s=0.0001)


def layout_of(mix, tp=1, k=1):
    layout = Layout(name=mix, groups=MIXES[mix], tp=tp)
    return layout.with_object_tokens(16 * k) if k > 1 else layout


class Pair:
    """The same requests on an engine with hybridkv and on one without."""

    def __init__(
        self,
        layout,
        store,
        *,
        num_blocks=120,
        max_step_tokens=48,
        prefix_cache=False,
        mover=MOVER,
        **settings,
    ):
        self.model = Model(layout, seed=3)
        self.memory = EngineMemory(layout, num_blocks=num_blocks)
        self.connector = ServiceConnector(
            self.memory, store, scheduler=SchedulerSettings(lookup_timeout_s=None, **settings), mover=mover
        )
        steps = {"max_step_tokens": max_step_tokens}
        self.engine = Engine(self.model, self.memory, self.connector, prefix_cache=prefix_cache, **steps)
        self.plain = Engine(self.model, EngineMemory(layout, num_blocks=400), NoConnector(), **steps)

    def submit(self, request_id, prompt, max_output=3):
        for engine in (self.engine, self.plain):
            engine.submit(request_id, prompt, max_output=max_output)

    def run(self):
        self.engine.run()
        self.plain.run()

    def serve(self, request_id, prompt, max_output=3):
        """Serve one request, wait until it is saved, and return its hit."""
        self.submit(request_id, prompt, max_output)
        self.run()
        self.settle()
        return self.compare(request_id)

    def settle(self):
        """Wait until every job has ended and been reported."""
        for worker in self.connector.workers:
            assert worker.drain(30)
        self.connector.finished_loads()

    def compare(self, request_id):
        """Assert equal outputs; return the last hit."""
        with_cache, without = self.engine.outputs[request_id], self.plain.outputs[request_id]
        assert with_cache.tokens == without.tokens
        np.testing.assert_allclose(with_cache.logits, without.logits, atol=1e-9, rtol=0)
        return with_cache.hits[-1]

    def close(self):
        """Assert that nothing is held or written that should not be."""
        self.settle()
        assert self.connector.side.is_idle
        assert self.connector.side.num_pinned == 0
        self.engine.reset_prefix_cache()
        for group, arrays in enumerate(self.memory.arrays):
            assert self.memory.num_free(group) == len(arrays[0]) - 1
        self.memory.check()
        self.connector.close()


def prompt_of(rng, length):
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_resent_a_longer_and_a_diverging_prompt_hit_and_get_the_same_output(mix, tp):
    rng = random.Random(1)
    pair = Pair(layout_of(mix, tp), MemoryStore())
    first = prompt_of(rng, 100)
    assert pair.serve("first", first) == 0
    hits = {
        "again": pair.serve("again", first),
        "longer": pair.serve("longer", first + prompt_of(rng, 40)),
        "diverging": pair.serve("diverging", first[:70] + prompt_of(rng, 50)),
    }
    if "states" not in mix:  # with recurrent layers a state exists only where a step ended
        assert hits["again"] >= 80
        assert hits["longer"] >= 80
        assert hits["diverging"] >= 48
    assert hits["again"] > 0
    pair.close()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(4))
def test_random_workloads_get_the_same_outputs(mix, seed):
    rng = random.Random(seed)
    retention = rng.choice(["all", 0, 2 * layout_of(mix).alignment])
    pair = Pair(
        layout_of(mix, tp=rng.choice([1, 2])),
        MemoryStore(rng.choice([None, 60_000])),
        num_blocks=rng.choice([60, 120]),
        max_step_tokens=rng.choice([16, 40, 200]),
        prefix_cache=rng.random() < 0.5,
        retention=retention,
    )
    shared = [prompt_of(rng, rng.randint(10, 90)) for _ in range(3)]
    total_hits = 0
    for round_idx in range(4):
        ids = []
        for idx in range(rng.randint(1, 4)):
            prompt = rng.choice(shared)
            prompt = prompt[: rng.randint(1, len(prompt))] + prompt_of(rng, rng.randint(0, 40))
            shared.append(prompt)
            ids.append(f"{round_idx}-{idx}")
            pair.submit(ids[-1], prompt, rng.randint(1, 5))
        for _ in range(rng.randint(0, 3)):
            pair.engine.step()
            running = [r.request_id for r in pair.engine._in_state("running")]
            if running and rng.random() < 0.5:
                pair.engine.preempt(rng.choice(running))
        if rng.random() < 0.3 and len(ids) > 1 and ids[-1] in pair.engine._requests:
            pair.engine.abort(ids[-1])
            pair.plain.abort(ids.pop())
        pair.run()
        total_hits += sum(pair.compare(request_id) for request_id in ids)
    pair.close()


@pytest.mark.parametrize("mix", ["full, window", "all kinds"])
def test_packed_objects_and_a_device_prefix_inside_them_get_the_same_output(mix):
    rng = random.Random(2)
    pair = Pair(layout_of(mix, k=2), MemoryStore(), prefix_cache=True)
    first = prompt_of(rng, 150)
    pair.serve("first", first)
    pair.engine.reset_prefix_cache()
    pair.serve("short", first[:50] + prompt_of(rng, 4))
    pair.serve("again", first)
    pair.close()


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("mix", ["full, window", "all kinds"])
def test_store_faults_never_change_an_output(mix, fault):
    rng = random.Random(3)
    store = FaultyStore(MemoryStore(), rates={fault: 0.3} if fault is not Fault.FLIPPED else {}, seed=5)
    pair = Pair(layout_of(mix), store)
    first = prompt_of(rng, 100)
    for idx in range(6):
        pair.serve(str(idx), first[: 60 + 8 * idx] + prompt_of(rng, 10))
    pair.close()


class Gated(MemoryStore):
    """Puts, or gets, wait at a gate."""

    def __init__(self, *, puts):
        super().__init__()
        self.gate, self.puts = threading.Event(), puts

    def put(self, keys, sources, hints=None):
        if self.puts:
            self.gate.wait()
        return super().put(keys, sources, hints)

    def get(self, keys, targets):
        if not self.puts:
            self.gate.wait()
        return super().get(keys, targets)


def test_no_step_waits_for_a_save():
    store, rng = Gated(puts=True), random.Random(6)
    pair = Pair(layout_of("full, window"), store)
    for request_id in ("a", "b"):
        pair.submit(request_id, prompt_of(rng, 100), max_output=8)
    pair.run()  # ends although no put has
    assert store.stats().objects == 0
    assert not pair.connector.side.is_idle
    store.gate.set()
    pair.settle()
    assert store.stats().objects > 0
    pair.compare("a")
    pair.compare("b")
    pair.close()


def test_other_requests_compute_while_one_waits_for_its_load():
    store, rng = Gated(puts=False), random.Random(7)
    pair = Pair(layout_of("full, window"), store)
    first = prompt_of(rng, 100)
    pair.serve("first", first)
    pair.submit("loading", first)
    pair.engine.step()
    pair.submit("other", prompt_of(rng, 60))
    while "other" not in pair.engine.outputs:
        pair.engine.step()
    assert "loading" not in pair.engine.outputs
    store.gate.set()
    pair.run()
    assert pair.compare("loading") > 0
    pair.compare("other")
    pair.close()


class Held(ManualClock):
    """Puts and gets that sleep on it do not wake until they are let go; lookups pass."""

    def __init__(self):
        super().__init__()
        self.awake = threading.Event()

    def sleep(self, seconds):
        if threading.current_thread().name.startswith("hybridkv-store"):
            self.awake.wait()
        super().sleep(seconds)


def test_prefill_and_decode_go_on_while_a_distant_store_takes_its_time():
    clock, rng, store = Held(), random.Random(12), MemoryStore()
    clock.awake.set()
    pair = Pair(layout_of("full, window"), LatencyStore(store, per_call_s=1.0, clock=clock))
    first = prompt_of(rng, 100)
    pair.serve("first", first)
    num_stored = store.stats().objects
    clock.awake.clear()
    pair.submit("loading", first)
    pair.submit("saving", prompt_of(rng, 100), max_output=20)
    num_steps = 0
    while "saving" not in pair.engine.outputs:
        pair.engine.step()
        num_steps += 1
    # Three steps of prefill and nineteen of decode, whatever the store does; then all of it is still to come.
    assert num_steps <= 25
    assert "loading" not in pair.engine.outputs
    assert store.stats().objects == num_stored
    metrics = pair.connector.workers[0].metrics()
    assert metrics.jobs >= 2
    assert metrics.staging_bytes_held > 0
    clock.awake.set()
    pair.run()
    pair.settle()
    assert store.stats().objects > num_stored
    assert pair.compare("loading") > 0
    pair.compare("saving")
    assert pair.connector.workers[0].metrics().calls.seconds > 0
    pair.close()


class Swapping(MemoryStore):
    """Serves the objects of one spec group with other bytes."""

    def __init__(self, spec_group):
        super().__init__()
        self.spec_group = spec_group

    def get(self, keys, targets):
        results = super().get(keys, targets)
        if spec_group_of(keys[0]) == self.spec_group:
            for ((address, num_bytes),) in targets:
                floats = np.frombuffer((ctypes.c_char * num_bytes).from_address(address), np.float64)
                floats[:] = -3 * floats[::-1]
        return results


@pytest.mark.parametrize("mix", ["full, window", "full, states", "latents, window, draft", "all kinds"])
def test_wrong_bytes_of_any_one_group_change_the_output(mix):
    layout = layout_of(mix)
    for group in layout.spec_groups:
        rng = random.Random(4)
        pair = Pair(layout, Swapping(group.index))
        first = prompt_of(rng, 105)  # so short above the hit that every window still reaches below it
        pair.serve("first", first)
        pair.submit("again", first)
        pair.run()
        with_cache, without = pair.engine.outputs["again"], pair.plain.outputs["again"]
        hit = with_cache.hits[-1]
        assert hit > 0
        is_same = np.allclose(with_cache.logits, without.logits, atol=1e-9, rtol=0)
        assert is_same == (not group.needed_objects(hit, 0)), group.name
        pair.settle()
        pair.connector.close()
