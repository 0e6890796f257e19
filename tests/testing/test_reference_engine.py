"""The reference engine against a naive forward, against itself, and against connectors that cheat."""

import numpy as np
import pytest

from hybridkv.errors import SpecError
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.testing.reference_engine import Engine, NoConnector
from hybridkv.testing.reference_model import (
    HEAD_DIM,
    HEADS,
    NULL,
    VOCABULARY,
    EngineMemory,
    Model,
    reference_group,
)


def layout(name, *groups):
    return Layout(name=name, groups=groups)


FULL = reference_group("full", Full(block_size=4), layers=2)
WINDOW = reference_group("window", SlidingWindow(block_size=4, window=7), layers=2)
CHUNKED = reference_group("chunked", ChunkedLocal(block_size=4, chunk=20), layers=2)
STATE = reference_group("state", Recurrent(block_size=8), layers=2)
LAYOUTS = [
    layout("full only", FULL),
    layout("window only", WINDOW),
    layout("chunked only", CHUNKED),
    layout("state only", STATE),
    layout("latent only", reference_group("latent", MLA(block_size=4), layers=2)),
    layout("window of one", reference_group("one", SlidingWindow(block_size=4, window=1)), FULL),
    layout("windows", WINDOW, FULL, reference_group("wide", SlidingWindow(block_size=8, window=9, extra=2))),
    layout("chunks", CHUNKED, FULL),
    layout("states", STATE, FULL),
    layout("all", FULL, WINDOW, CHUNKED, STATE),
    layout(
        "all with lookahead",
        reference_group("full", Full(block_size=4), lookahead=4, blocks_per_object=2),
        reference_group("window", SlidingWindow(block_size=4, window=7), lookahead=4),
        reference_group("chunked", ChunkedLocal(block_size=4, chunk=20), lookahead=4),
        reference_group("state", Recurrent(block_size=8), lookahead=8),
    ),
]
HYBRIDS = LAYOUTS[5:]
BY_NAME = {"argvalues": LAYOUTS, "ids": [one.name for one in LAYOUTS]}
HYBRIDS_BY_NAME = {"argvalues": HYBRIDS, "ids": [one.name for one in HYBRIDS]}


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(VOCABULARY, size=length).tolist()


def without(_memory):
    return NoConnector()


def engine(of, connector=without, *, num_blocks=64, **settings):
    """Return an engine, its memory and its connector, which is given as what makes it of the memory."""
    memory = EngineMemory(of, num_blocks=num_blocks)
    made = connector(memory)
    return Engine(Model(of), memory, made, **settings), memory, made


def served(of, prompts, *, max_output=6, **settings):
    """Return the outputs of prompts that are served together."""
    serving, memory, _ = engine(of, **settings)
    for idx, prompt in enumerate(prompts):
        serving.submit(str(idx), prompt, max_output=max_output)
    serving.run()
    memory.check()
    return [serving.outputs[str(idx)] for idx in range(len(prompts))]


def assert_same(outputs, expected, *, bitwise=False):
    for output, other in zip(outputs, expected, strict=True):
        assert output.tokens == other.tokens
        np.testing.assert_allclose(output.logits, other.logits, rtol=0, atol=0 if bitwise else 1e-9)


def differ(output, other):
    return not np.allclose(output.logits, other.logits, rtol=0, atol=1e-3)


# The oracle of the model: one position at a time over the whole sequence, nothing cached.


def reads(spec, query, key):
    match spec:
        case SlidingWindow():
            return query - key < spec.window + spec.extra
        case ChunkedLocal():
            return query // spec.chunk == key // spec.chunk
        case _:
            return True


def unit(vector):
    return vector / np.sqrt((vector**2).mean() + 1e-6)


def turned(head, position):
    pairs = [complex(a, b) for a, b in zip(head[: HEAD_DIM // 2], head[HEAD_DIM // 2 :], strict=True)]
    spun = [pair * np.exp(1j * position * 30.0 ** (-i / (len(pairs) - 1))) for i, pair in enumerate(pairs)]
    return np.array([pair.real for pair in spun] + [pair.imag for pair in spun])


def mixed_naively(spec, weights, xs, head):
    part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    q, k, v = ([(unit(x) @ weights[name])[part] for x in xs] for name in "qkv")
    if isinstance(spec, Recurrent):
        state, out = np.zeros((HEAD_DIM, HEAD_DIM)), []
        for x, query, key, value in zip(xs, q, k, v, strict=True):
            keep = 1 / (1 + np.exp(-3 - (unit(x) @ weights["gate"])[head]))
            state = keep * state + np.outer(key, value)
            out.append(state.T @ query)
        return out
    out = []
    for i in range(len(xs)):
        keys = [j for j in range(i + 1) if reads(spec, i, j)]
        logits = [turned(q[i], i) @ turned(k[j], j) for j in keys]
        odds = np.exp(logits)
        out.append(sum(odd * v[j] for odd, j in zip(odds, keys, strict=True)) / odds.sum())
    return out


def naive_logits(model, sequence):
    xs = [model.embedding[token] for token in sequence]
    for group, _, weights in model.layers:
        spec = model.layout.groups[group].spec
        heads = [mixed_naively(spec, weights, xs, head) for head in range(HEADS)]
        xs = [
            x + unit(np.concatenate(parts)) @ weights["out"]
            for x, parts in zip(xs, zip(*heads, strict=True), strict=True)
        ]
        xs = [x + np.tanh(unit(x) @ weights["up"]) @ weights["down"] for x in xs]
    return [unit(x) @ model.unembedding for x in xs]


@pytest.mark.parametrize("of", **BY_NAME)
def test_an_output_is_that_of_a_naive_forward_over_the_whole_sequence(of):
    prompt = tokens(29)
    (output,) = served(of, [prompt], max_step_tokens=5)
    expected = naive_logits(Model(of), prompt + list(output.tokens[:-1]))[len(prompt) - 1 :]
    assert output.tokens == tuple(int(np.argmax(row)) for row in expected)
    np.testing.assert_allclose(output.logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("of", **BY_NAME)
def test_chunked_prefill_of_any_size_gives_the_output_of_one_shot(of):
    prompts = [tokens(37, 1), tokens(8, 2), tokens(1, 3)]
    expected = served(of, prompts)
    assert all(len(set(output.tokens)) > 1 for output in expected)
    for max_step_tokens in (1, 3, 8, 13, 40):
        assert_same(served(of, prompts, max_step_tokens=max_step_tokens), expected)


@pytest.mark.parametrize("of", **BY_NAME)
def test_equal_steps_give_bitwise_equal_output_in_any_blocks(of):
    serving, _, _ = engine(of, max_step_tokens=9)
    serving.submit("other", tokens(30, 1), max_output=1)
    serving.run()
    serving.submit("held", tokens(11, 3), max_output=40)
    serving.step()
    serving.step()
    serving.abort("held")
    serving.submit("a", tokens(33, 2), max_output=6)
    serving.run()
    assert_same([serving.outputs["a"]], served(of, [tokens(33, 2)], max_step_tokens=9), bitwise=True)


@pytest.mark.parametrize("of", **BY_NAME)
def test_a_preempted_request_ends_as_if_it_had_not_been(of):
    expected = served(of, [tokens(21)])
    for steps in range(1, 10):
        serving, memory, _ = engine(of, max_step_tokens=5)
        serving.submit("a", tokens(21), max_output=6)
        for _ in range(steps):
            serving.step()
        serving.preempt("a")
        memory.check()
        serving.run()
        assert_same([serving.outputs["a"]], expected)
        assert serving.outputs["a"].hits == (0, 0)


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_requests_that_do_not_fit_together_preempt_the_younger_ones(of):
    prompts = [tokens(20 + length, length) for length in range(5)]
    expected = served(of, prompts, max_output=12)
    serving, memory, _ = engine(of, num_blocks=14, max_step_tokens=30)
    for idx, prompt in enumerate(prompts):
        serving.submit(str(idx), prompt, max_output=12)
    serving.run()
    assert serving.num_preemptions > 0
    assert len(serving.outputs["0"].hits) == 1
    assert_same([serving.outputs[str(idx)] for idx in range(5)], expected)
    assert all(memory.num_free(group) == 13 for group in range(len(of.groups)))


def test_a_request_that_can_never_fit_is_named():
    serving, _, _ = engine(LAYOUTS[0], num_blocks=3)
    serving.submit("big", tokens(20), max_output=1)
    with pytest.raises(AssertionError, match="big"):
        serving.run(max_steps=5, idle_s=0)


# Blocks and steps, as a connector sees them.


class Recorder(NoConnector):
    """Keeps what the engine tells, and checks that no step writes to what others hold."""

    def __init__(self, memory):
        self.memory, self.steps, self.ended = memory, [], []

    def start_step(self, steps):
        for step in steps:
            for group, table in enumerate(step.tables):
                size = self.memory.layout.groups[group].spec.block_size
                written = table[step.before // size :]
                assert all(self.memory.num_holders(group, block) == 1 for block in written if block)

    def end_step(self, steps):
        self.steps += steps

    def finished(self, last):
        self.ended.append(last)


def recorded(of, prompt_length, **settings):
    serving, memory, recorder = engine(of, Recorder, **settings)
    serving.submit("a", tokens(prompt_length), max_output=6)
    serving.run()
    memory.check()
    return recorder, serving


def test_blocks_that_fell_out_of_the_window_are_free_and_null_in_the_table():
    of = layout("window only", WINDOW)
    recorder, _ = recorded(of, 200, num_blocks=5, max_step_tokens=4)
    for step in recorder.steps:
        (table,) = step.tables
        first = max(0, step.before - 6) // 4
        assert len(table) == -(-step.after // 4)
        assert [block == NULL for block in table] == [idx < first for idx in range(len(table))]


def test_blocks_of_older_chunks_are_freed():
    recorder, _ = recorded(layout("chunked only", CHUNKED), 100, num_blocks=8, max_step_tokens=5)
    for step in recorder.steps:
        (table,) = step.tables
        freed = [idx for idx, block in enumerate(table) if block == NULL]
        assert freed == list(range(step.before // 20 * 5))


@pytest.mark.parametrize("max_step_tokens", [1, 5, 8, 20, 100])
@pytest.mark.parametrize("lookahead", [0, 4])
def test_states_are_shown_only_where_a_step_begins_or_ends(max_step_tokens, lookahead):
    of = layout("mix", STATE, reference_group("full", Full(block_size=4), lookahead=lookahead))
    recorder, serving = recorded(of, 34, max_step_tokens=max_step_tokens)
    ends = {step.after for step in recorder.steps}
    assert (24 if lookahead else 32) in ends
    if max_step_tokens <= 8:
        assert {8, 16, 24} <= ends
    else:
        assert all(end % 8 == 0 for end in ends if end < 34)
    for step in recorder.steps:
        shown = {(idx + 1) * 8 for idx, block in enumerate(step.tables[0]) if block}
        assert shown == {end for end in (step.before, step.after) if end % 8 == 0 and end}
    (last,) = recorder.ended
    assert last.before == last.after == 39
    assert last.tokens == (*tokens(34), *serving.outputs["a"].tokens)
    assert len(last.tables[1]) == 10


def test_a_pinned_block_keeps_its_bytes_until_it_is_unpinned():
    serving, memory, recorder = engine(LAYOUTS[0], Recorder, num_blocks=4)
    serving.submit("a", tokens(7), max_output=2)
    serving.step()
    block = recorder.steps[0].tables[0][0]
    memory.pin(0, block)
    content = memory.arrays[0][0][block].copy()
    serving.run()
    assert memory.num_free(0) == 2
    serving.submit("b", tokens(7, 1), max_output=2)
    serving.run()
    assert (memory.arrays[0][0][block] == content).all()
    memory.unpin(0, block)
    assert memory.num_free(0) == 3
    assert not (memory.arrays[0][0][block] == content).all()
    memory.check()


def test_wrong_use_of_blocks_is_an_error():
    memory = EngineMemory(LAYOUTS[0], num_blocks=4)
    for call in (memory.pin, memory.unpin):
        for block in (NULL, 2):
            with pytest.raises(AssertionError, match="nobody holds"):
                call(0, block)
    memory.arrays[0][1][2, 5] = 0
    with pytest.raises(AssertionError, match="block 2 was written"):
        memory.check()
    memory.arrays[0][1][2, 5] = 0xFF
    memory.arrays[0][0][NULL, 0] = 0
    with pytest.raises(AssertionError, match="block 0 was written"):
        memory.check()


def test_groups_of_another_size_or_without_prefixes_are_refused():
    wrong = CacheGroup(name="wrong", spec=Full(block_size=4), layer_block_bytes=8)
    scratch = reference_group("scratch", Full(block_size=4))
    object.__setattr__(scratch, "prefix_cacheable", False)
    for group in (wrong, scratch):
        with pytest.raises(SpecError, match=group.name):
            EngineMemory(layout("mix", FULL, group), num_blocks=4)


def test_a_request_may_be_aborted_anywhere_and_its_id_used_again():
    serving, memory, _ = engine(LAYOUTS[9], num_blocks=20, max_step_tokens=8)
    expected = served(LAYOUTS[9], [tokens(20)])
    for steps in range(7):
        serving.submit("a", tokens(30, 1), max_output=20)
        serving.submit("b", tokens(20), max_output=6)
        for _ in range(steps):
            serving.step()
        with pytest.raises(AssertionError, match="still being served"):
            serving.submit("a", tokens(3), max_output=1)
        serving.abort("a")
        serving.run()
        assert_same([serving.outputs.pop("b")], expected)
        assert "a" not in serving.outputs
        assert all(memory.num_free(group) == 19 for group in range(4))
        memory.check()


# Connectors.


class Cache(NoConnector):
    """An honest connector: bytes by group and prefix, saved whenever a block is complete."""

    def __init__(self, memory, *, polls=0):
        self.memory, self.polls = memory, polls
        self.stored, self.asked, self.prefixes, self.loading = {}, {}, {}, {}
        self.fails = lambda _request_id: False

    def covering(self, group, prefix, lookahead=0):
        spec = self.memory.layout.groups[group].spec
        return sorted({position // spec.block_size for position in spec.needed(prefix, lookahead)})

    def key(self, group, idx, prompt):
        return group, prompt[: (idx + 1) * self.memory.layout.groups[group].spec.block_size]

    def legal(self, prefix, prompt):
        return all(
            self.key(group, idx, prompt) in self.stored
            for group, of in enumerate(self.memory.layout.groups)
            for idx in self.covering(group, prefix, of.lookahead)
        )

    def lookup(self, request_id, prompt, device_prefix):
        waits = self.asked.setdefault(request_id, self.polls)
        self.asked[request_id] -= 1
        if waits > 0:
            return None
        del self.asked[request_id]
        self.prefixes[request_id] = prompt, device_prefix
        of = self.memory.layout
        top = (len(prompt) - max(of.margin, 1)) // of.alignment * of.alignment
        hits = (p for p in range(top, device_prefix, -of.alignment) if self.legal(p, prompt))
        return next(hits, device_prefix)

    def allocated(self, request_id, hit, tables):
        prompt, device_prefix = self.prefixes[request_id]
        if hit == device_prefix:
            return
        targets = []
        for group, table in enumerate(tables):
            size = self.memory.layout.groups[group].spec.block_size
            needed = self.covering(group, hit)
            assert [idx for idx, block in enumerate(table) if block] == needed
            targets += [
                (group, table[idx], self.key(group, idx, prompt))
                for idx in needed
                if idx * size >= device_prefix
            ]
        for group, block, _ in targets:
            self.memory.pin(group, block)
        self.loading[request_id] = [self.polls, targets]

    def finished_loads(self):
        done, failed = set(), set()
        for request_id, load in list(self.loading.items()):
            load[0] -= 1
            if load[0] < 0:
                is_bad = self.fails(request_id)
                (failed if is_bad else done).add(request_id)
                self.end_load(request_id, move=not is_bad)
        return done, failed

    def end_load(self, request_id, *, move):
        for group, block, key in self.loading.pop(request_id, (0, ()))[1]:
            if move:
                self.load(group, block, key)
            self.memory.unpin(group, block)

    def load(self, group, block, key):
        for array, content in zip(self.memory.arrays[group], self.stored[key], strict=True):
            array[block] = content

    def end_step(self, steps):
        for step in steps:
            for group, table in enumerate(step.tables):
                size = self.memory.layout.groups[group].spec.block_size
                for idx, block in enumerate(table[: step.after // size]):
                    if block:
                        content = [array[block].copy() for array in self.memory.arrays[group]]
                        self.stored.setdefault(self.key(group, idx, step.tokens), content)

    def finished(self, last):
        self.asked.pop(last.request_id, None)
        self.end_load(last.request_id, move=False)


def warm_and_cold(of, *, connector=Cache, prompt=None, saved=(), **settings):
    """Return a prompt's output with what other prompts have stored, its output without."""
    prompt = tokens(45) if prompt is None else prompt
    serving, memory, _ = engine(of, connector, **settings)
    for idx, other in enumerate(saved or [prompt]):
        serving.submit(f"saved {idx}", other, max_output=8)
        serving.run()
    serving.submit("warm", prompt, max_output=8)
    serving.run()
    memory.check()
    assert all(memory.num_free(group) == 63 for group in range(len(of.groups)))
    (cold,) = served(of, [prompt], max_output=8)
    return serving.outputs["warm"], cold


@pytest.mark.parametrize("polls", [0, 2])
@pytest.mark.parametrize("of", **BY_NAME)
def test_an_honest_connector_changes_no_output(of, polls):
    warm, cold = warm_and_cold(of, connector=lambda memory: Cache(memory, polls=polls))
    resend = (45 - max(1, of.margin)) // of.alignment * of.alignment
    assert warm.hits == (resend,)
    assert_same([warm], [cold])


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_a_prompt_that_branches_resumes_where_the_shared_part_allows(of):
    shared = tokens(30)
    warm, cold = warm_and_cold(
        of, prompt=shared + tokens(21, 1), saved=[shared + tokens(15, 2)], max_step_tokens=8
    )
    assert 0 < warm.hits[0] <= 30
    assert_same([warm], [cold])


class Dropping(Cache):
    """Claims every load of one group without moving a byte."""

    bad_group = 0

    def load(self, group, block, key):
        if group != self.bad_group:
            super().load(group, block, key)


class Swapping(Cache):
    """Loads one group's blocks from another prompt."""

    bad_group = 0

    def load(self, group, block, key):
        if group == self.bad_group:
            key = next(k for k in self.stored if k[0] == group and len(k[1]) == len(key[1]) and k != key)
        super().load(group, block, key)


@pytest.mark.parametrize("cheat", [Dropping, Swapping])
@pytest.mark.parametrize("of", **BY_NAME)
def test_a_cheat_in_any_single_group_changes_the_output(of, cheat):
    prompts = [tokens(38), tokens(38, 1)]
    for bad_group, group in enumerate(of.groups):
        bad = type("Bad", (cheat,), {"bad_group": bad_group})
        warm, cold = warm_and_cold(of, connector=bad, prompt=prompts[0], saved=prompts)
        if group.name == "one":
            assert_same([warm], [cold])
        else:
            assert differ(warm, cold), group.name
            assert cheat is Swapping or warm.tokens != cold.tokens, group.name


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_writing_to_a_block_after_its_request_has_gone_is_found(of):
    serving, memory, cache = engine(of, lambda memory: Cache(memory, polls=3))
    serving.submit("first", tokens(45), max_output=1)
    serving.run()
    serving.submit("a", tokens(45), max_output=1)
    while "a" not in cache.loading:
        serving.step()
    target = cache.loading["a"][1][0]
    serving.abort("a")
    memory.check()
    cache.load(*target)
    with pytest.raises(AssertionError, match="while nobody held it"):
        memory.check()


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_a_failed_load_is_looked_up_again_and_then_recomputed(of):
    def failing(memory):
        cache = Cache(memory)

        def fails(request_id):
            cache.stored.clear()
            return request_id == "warm"

        cache.fails = fails
        return cache

    warm, cold = warm_and_cold(of, connector=failing)
    assert len(warm.hits) == 2
    assert warm.hits[1] == 0
    assert_same([warm], [cold])


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_a_preempted_request_resumes_from_the_connector_under_its_own_id(of):
    (cold,) = served(of, [tokens(21)])
    serving, memory, _ = engine(of, Cache, max_step_tokens=8)
    serving.submit("a", tokens(21), max_output=6)
    for _ in range(6):
        serving.step()
    serving.preempt("a")
    serving.run()
    memory.check()
    assert serving.outputs["a"].hits[0] == 0
    assert serving.outputs["a"].hits[1] > 0
    assert_same([serving.outputs["a"]], [cold])


@pytest.mark.parametrize("of", **BY_NAME)
def test_a_hit_is_bitwise_equal_to_a_hit_of_the_engines_own_cache(of):
    prompt = tokens(45)
    outputs = []
    for connector, prefix_cache in ((Cache, False), (without, True)):
        serving, memory, _ = engine(of, connector, prefix_cache=prefix_cache, max_step_tokens=16)
        for request_id in ("first", "again"):
            serving.submit(request_id, prompt, max_output=8)
            serving.run()
        memory.check()
        outputs.append(serving.outputs["again"])
    assert outputs[0].hits == outputs[1].hits
    assert outputs[0].hits[0] > 0
    assert_same(outputs[:1], outputs[1:], bitwise=True)


@pytest.mark.parametrize("of", **HYBRIDS_BY_NAME)
def test_a_load_above_a_device_prefix_leaves_the_shared_blocks_alone(of):
    prompt = tokens(60)
    serving, memory, cache = engine(of, Cache, prefix_cache=True, max_step_tokens=8)
    serving.submit("long", prompt, max_output=4)
    serving.run()
    serving.reset_prefix_cache()
    assert all(memory.num_free(group) == 63 for group in range(len(of.groups)))
    stored, cache.stored = cache.stored, {}
    serving.submit("short", prompt[:33], max_output=1)
    serving.run()
    cache.stored = stored
    serving.submit("a", prompt, max_output=4)
    serving.submit("b", prompt[:33], max_output=4)
    serving.run()
    _, device_prefix = cache.prefixes["a"]
    assert 0 < device_prefix < serving.outputs["a"].hits[0]
    assert_same([serving.outputs[name] for name in "ab"], served(of, [prompt, prompt[:33]], max_output=4))
    serving.reset_prefix_cache()
    memory.check()


def test_the_engines_own_hit_matches_the_lookahead_and_computes_it_again():
    shared = tokens(32)
    for lookahead, hit in ((0, 32), (4, 28), (5, 24)):
        of = layout("ahead", reference_group("full", Full(block_size=4), lookahead=lookahead), WINDOW)
        serving, memory, _ = engine(of, Recorder, prefix_cache=True, max_step_tokens=4)
        for name, ending in (("first", [1, 2, 3]), ("again", tokens(9, 5))):
            serving.submit(name, shared + ending, max_output=6)
            serving.run()
        assert serving.outputs["again"].hits == (hit,)
        assert_same([serving.outputs["again"]], served(of, [shared + tokens(9, 5)]))
        memory.check()


def test_a_preempted_request_that_is_aborted_has_nothing_left():
    serving, memory, recorder = engine(LAYOUTS[9], Recorder)
    serving.submit("a", tokens(20), max_output=6)
    serving.step()
    serving.step()
    serving.preempt("a")
    with pytest.raises(AssertionError, match="does not run"):
        serving.preempt("a")
    serving.abort("a")
    (last,) = recorder.ended
    assert (last.before, last.after, len(last.tokens)) == (0, 0, 21)
    assert last.tables == ((), (), (), ())
    assert memory.num_free(0) == 63


def test_kept_blocks_make_room_for_requests():
    of = LAYOUTS[9]
    prompts = [tokens(30, seed) for seed in range(6)]
    outputs = served(of, [*prompts, *prompts], num_blocks=24, prefix_cache=True, max_step_tokens=16)
    assert_same(outputs, served(of, [*prompts, *prompts]))


@pytest.mark.parametrize("hit", [4, 44, 48])
def test_a_hit_that_is_no_boundary_is_refused(hit):
    class Wrong(NoConnector):
        def lookup(self, _request_id, _tokens, _device_prefix):
            return hit

    serving, _, _ = engine(LAYOUTS[9], lambda _memory: Wrong())
    serving.submit("a", tokens(48), max_output=1)
    with pytest.raises(AssertionError, match="no boundary"):
        serving.step()


def test_reports_of_loads_that_nobody_awaits_are_refused():
    class Stale(NoConnector):
        def finished_loads(self):
            return {"gone"}, set()

    serving, _, _ = engine(LAYOUTS[0], lambda _memory: Stale())
    with pytest.raises(AssertionError, match="gone"):
        serving.step()
