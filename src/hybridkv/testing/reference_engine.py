"""A tiny real engine: paged blocks, steps, preemption, with and without a cache outside of it.

It is the oracle of "a hit never changes the model's output", with the model of ``reference_model``. Its
scheduling and its ``Connector`` follow vLLM 0.32::

    step():  finished_loads | lookup, allocated | start_step | the model | end_step | finished
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from hybridkv.specs.base import CacheSpec
from hybridkv.specs.recurrent import Recurrent
from hybridkv.testing.reference_model import NULL, EngineMemory, Floats, Model, state_entry

BlockTables = tuple[tuple[int, ...], ...]
"""Per cache group a request's block ids in the order of its tokens, ``NULL`` where it has no block."""


def _blocks(spec: CacheSpec, prefix: int, lookahead: int = 0) -> range:
    """Return the blocks that cover ``needed``, empty and at ``prefix`` where nothing is needed."""
    need = spec.needed(prefix, lookahead)
    if not need:
        return range(prefix // spec.block_size, prefix // spec.block_size)
    return range(need.start // spec.block_size, -(-need.stop // spec.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStep:
    """What a step does to one request.

    Attributes:
        request_id: of the request.
        tokens: prompt and output as they are known before the step.
        before: tokens computed before the step.
        after: tokens computed once it has ended.
        tables: covering ``after`` tokens: every block that the step reads or writes. Of a recurrent group
            only states at block ends are shown: the one the step starts from, the one it ends with.
    """

    request_id: str
    tokens: tuple[int, ...]
    before: int
    after: int
    tables: BlockTables


class Connector(Protocol):
    """A cache outside the engine, called on the engine's thread; its copies may run on others.

    What a copy still uses must be pinned: a request may be preempted or ended between any two steps.
    """

    def lookup(self, request_id: str, tokens: tuple[int, ...], device_prefix: int) -> int | None:
        """Return the hit in tokens, ``device_prefix`` where there is nothing more, ``None`` = ask again.

        Called before every start of a request, and again while the engine has no room for the answer;
        after a preemption the tokens include the output so far.
        """

    def allocated(self, request_id: str, hit: int, tables: BlockTables) -> None:
        """Learn that a request starts at ``hit``; if that is above the device's prefix, load.

        The request then waits for ``finished_loads``. Of the tables, which cover ``hit`` tokens, every block
        that ends above the device's prefix must be filled; the others are shared and must not be written.
        """

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load is done and those whose load failed, each once.

        A failed one loses its blocks and starts anew with a lookup.
        """

    def start_step(self, steps: Sequence[RequestStep]) -> None:
        """Prepare a step, which may be empty; the model runs next."""

    def end_step(self, steps: Sequence[RequestStep]) -> None:
        """Save, or pin and save later: the engine frees what it needs no more from here on."""

    def preempted(self, request_id: str) -> None:
        """Learn that a running request is about to lose its blocks and to start anew later."""

    def finished(self, last: RequestStep) -> None:
        """Learn that a request, wherever it is, ends: its blocks are freed next.

        Args:
            last: tokens with the whole output, ``before`` = ``after`` = the computed ones, live tables.
        """


class NoConnector(Connector):
    """No cache outside: the other side of every comparison."""

    def lookup(self, request_id: str, tokens: tuple[int, ...], device_prefix: int) -> int | None:  # noqa: ARG002
        """Return no hit."""
        return device_prefix

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Return nothing."""
        return set(), set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """What a finished request got.

    Attributes:
        tokens: greedy output.
        logits: float64, shape (len(tokens), vocabulary).
        hits: the hit of every start: more than one after preemptions and failed loads.
    """

    tokens: tuple[int, ...]
    logits: Floats
    hits: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    request_id: str
    tokens: list[int]
    end: int
    tables: list[dict[int, int]]
    state: Literal["waiting", "loading", "running"] = "waiting"
    computed: int = 0
    logits: list[Floats] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)


class Engine:
    """Serves requests, the older ones first.

    Args:
        model: computes; its layout is the memory's.
        memory: of this engine alone.
        connector: the cache outside.
        max_step_tokens: tokens computed in one step over all requests, >= 1.
        prefix_cache: whether complete blocks stay on the device for later prompts, while there is room.

    Attributes:
        outputs: of finished requests, by id.
        num_preemptions: since the start.

    Example:
        >>> from hybridkv import Full, Layout
        >>> from hybridkv.testing.reference_model import reference_group
        >>> layout = Layout(name="tiny", groups=(reference_group("full", Full(block_size=4)),))
        >>> engine = Engine(Model(layout), EngineMemory(layout, num_blocks=8), NoConnector())
        >>> engine.submit("a", [1, 2, 3, 4, 5], max_output=3)
        >>> engine.run()
        >>> len(engine.outputs["a"].tokens)
        3
    """

    def __init__(
        self,
        model: Model,
        memory: EngineMemory,
        connector: Connector,
        *,
        max_step_tokens: int = 1 << 20,
        prefix_cache: bool = False,
    ) -> None:
        assert model.layout == memory.layout, "model and memory differ in their layout"
        self._model, self._memory, self._connector = model, memory, connector
        self._layout, self._specs = memory.layout, [group.spec for group in memory.layout.groups]
        self._max_step_tokens, self._keeps_prefixes = max_step_tokens, prefix_cache
        self._requests: dict[str, _Request] = {}
        self._kept: dict[tuple[int, tuple[int, ...]], int] = {}
        self.outputs: dict[str, Output] = {}
        self.num_preemptions = 0

    def submit(self, request_id: str, prompt: Sequence[int], *, max_output: int) -> None:
        """Queue a request of >= 1 tokens for >= 1 tokens; an id is free again once its request has ended."""
        assert request_id not in self._requests, f"request {request_id!r} is still being served"
        assert min(len(prompt), max_output) > 0, "a request has a prompt and wants an output"
        self._requests[request_id] = _Request(
            request_id=request_id,
            tokens=list(prompt),
            end=len(prompt) + max_output,
            tables=[{} for _ in self._specs],
        )

    def run(self, *, max_steps: int = 20_000, idle_s: float = 0.001) -> None:
        """Step until every request has ended; wait a little after a step that computed nothing.

        Raises:
            AssertionError: requests are left after that many steps.
        """
        for _ in range(max_steps):
            if not self._requests:
                return
            if not self.step():
                time.sleep(idle_s)
        raise AssertionError(f"after {max_steps} steps requests are left: {sorted(self._requests)}")

    def step(self) -> int:
        """Run one step and return how many tokens it computed."""
        self._settle_loads()
        scheduled = self._schedule()
        steps = [self._view(request, stop) for request, stop in scheduled]
        self._connector.start_step(steps)
        for request, stop in scheduled:
            self._compute(request, stop)
        self._connector.end_step(steps)
        for request, _ in scheduled:
            self._keep(request)
            if len(request.tokens) == request.end:
                self.outputs[request.request_id] = Output(
                    tokens=tuple(request.tokens[-len(request.logits) :]),
                    logits=np.array(request.logits),
                    hits=tuple(request.hits),
                )
                self.abort(request.request_id)
        return sum(step.after - step.before for step in steps)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is."""
        request = self._requests.pop(request_id)
        self._connector.finished(self._view(request, request.computed))
        self._release(request)

    def preempt(self, request_id: str) -> None:
        """Take a running request's blocks; it starts anew when it can, with its output so far."""
        assert self._requests[request_id].state == "running", f"request {request_id!r} does not run"
        self.num_preemptions += 1
        self._connector.preempted(request_id)
        self._release(self._requests[request_id])

    def reset_prefix_cache(self) -> None:
        """Give back the complete blocks that the engine keeps for later prompts."""
        for (group, _), block in self._kept.items():
            self._memory.unpin(group, block)
        self._kept.clear()

    def _in_state(self, state: str) -> list[_Request]:
        return [request for request in self._requests.values() if request.state == state]

    def _settle_loads(self) -> None:
        done, failed = self._connector.finished_loads()
        strange = (done | failed) - {request.request_id for request in self._in_state("loading")}
        assert not strange, f"finished_loads names {sorted(strange)}, which are not loading"
        assert not done & failed, f"finished_loads names {sorted(done & failed)} twice"
        for request_id in failed:
            self._release(self._requests[request_id])
        for request in [self._requests[request_id] for request_id in done]:
            request.state, request.computed = "running", request.hits[-1]
            self._keep(request)

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Return who computes up to where: first the running requests, then as many new ones as fit."""
        scheduled = []
        budget = self._max_step_tokens
        for request in self._in_state("running"):
            if budget and request.state == "running":
                stop = self._stop(request, budget)
                self._drop_unneeded(request, request.computed)
                if self._reserve_or_preempt(request, self._step_blocks(request, stop)):
                    scheduled.append((request, stop))
                    budget -= stop - request.computed
        for request in self._in_state("waiting"):
            if not budget or not self._start(request, budget):
                break
            if request.state == "running":
                stop = self._stop(request, budget)
                scheduled.append((request, stop))
                budget -= stop - request.computed
        return scheduled

    def _start(self, request: _Request, budget: int) -> bool:
        """Let a request load or run once its hit is known; return whether there was room for it."""
        device_prefix = request.computed = self._share_kept(request)
        hit = self._connector.lookup(request.request_id, tuple(request.tokens), device_prefix)
        if hit is None:
            self._release(request)
            return True
        boundary = hit % self._layout.alignment == 0 and device_prefix < hit <= self._last_boundary(request)
        assert boundary or hit == device_prefix, f"hit {hit} of {len(request.tokens)} tokens is no boundary"
        if boundary:
            self._drop_unneeded(request, hit)
            wanted = [list(_blocks(spec, hit)) for spec in self._specs]
        else:
            wanted = self._step_blocks(request, self._stop(request, budget))
        if not self._reserve(request, wanted):
            self._release(request)
            return False
        request.hits.append(hit)
        request.state = "loading" if boundary else "running"
        self._connector.allocated(request.request_id, hit, self._view(request, hit).tables)
        return True

    def _last_boundary(self, request: _Request) -> int:
        """Return the resend boundary: it leaves one token and the lookahead to compute."""
        most = len(request.tokens) - max(1, self._layout.margin)
        return max(0, most) // self._layout.alignment * self._layout.alignment

    def _stop(self, request: _Request, budget: int) -> int:
        """Return where a step ends: with states at multiples of the alignment and at the resend boundary."""
        total, align = len(request.tokens), self._layout.alignment
        stop = min(total, request.computed + budget)
        if any(spec.written_only_at_step_end for spec in self._specs):
            last = self._last_boundary(request)
            if request.computed < last:
                stop = min(stop, last)
            if request.computed < stop // align * align and stop < total:
                stop = stop // align * align
        return stop

    def _step_blocks(self, request: _Request, stop: int) -> list[list[int]]:
        """Return per group the table entries that a step writes."""
        return [
            [state_entry(spec, stop)]
            if isinstance(spec, Recurrent)
            else list(range(request.computed // spec.block_size, -(-stop // spec.block_size)))
            for spec in self._specs
        ]

    def _reserve_or_preempt(self, request: _Request, wanted: list[list[int]]) -> bool:
        while not self._reserve(request, wanted):
            victim = self._in_state("running")[-1]
            self.preempt(victim.request_id)
            if victim is request:
                return False
        return True

    def _reserve(self, request: _Request, wanted: list[list[int]]) -> bool:
        """Give a request the blocks that its tables lack: all or none."""
        lacking = [
            [idx for idx in indices if idx not in table]
            for indices, table in zip(wanted, request.tables, strict=True)
        ]
        if not all(self._make_room(group, len(indices)) for group, indices in enumerate(lacking)):
            return False
        for group, indices in enumerate(lacking):
            request.tables[group].update({idx: self._memory.allocate(group) for idx in indices})
        return True

    def _make_room(self, group: int, count: int) -> bool:
        for key, block in list(self._kept.items()):
            if self._memory.num_free(group) >= count:
                break
            if key[0] == group and self._memory.num_holders(group, block) == 1:
                self._memory.unpin(group, self._kept.pop(key))
        return self._memory.num_free(group) >= count

    def _compute(self, request: _Request, stop: int) -> None:
        span = range(request.computed, stop)
        logits = self._model.forward(self._memory, request.tokens, span, request.tables)
        request.computed = stop
        if stop == len(request.tokens):
            request.logits.append(logits)
            request.tokens.append(int(np.argmax(logits)))

    def _view(self, request: _Request, stop: int) -> RequestStep:
        tables = tuple(
            tuple(table.get(idx, NULL) for idx in range(-(-stop // spec.block_size)))
            for spec, table in zip(self._specs, request.tables, strict=True)
        )
        return RequestStep(
            request_id=request.request_id,
            tokens=tuple(request.tokens),
            before=request.computed,
            after=stop,
            tables=tables,
        )

    def _drop_unneeded(self, request: _Request, computed: int) -> None:
        """Free what fell out of a window, and the states before the last one."""
        for group, (spec, table) in enumerate(zip(self._specs, request.tables, strict=True)):
            first = _blocks(spec, computed).start
            for idx in [idx for idx in table if 0 <= idx < first]:
                self._memory.unpin(group, table.pop(idx))

    def _release(self, request: _Request) -> None:
        for group, table in enumerate(request.tables):
            for block in table.values():
                self._memory.unpin(group, block)
            table.clear()
        request.state, request.computed = "waiting", 0

    def _keep(self, request: _Request) -> None:
        """Hold a request's complete blocks for later prompts, if this engine does."""
        for group, (spec, table) in enumerate(zip(self._specs, request.tables, strict=True)):
            for idx, block in table.items() if self._keeps_prefixes else ():
                end = (idx + 1) * spec.block_size
                key = (group, tuple(request.tokens[:end]))
                if 0 < end <= request.computed and key not in self._kept:
                    self._kept[key] = block
                    self._memory.pin(group, block)

    def _share_kept(self, request: _Request) -> int:
        """Give a request the kept blocks of its longest legal prefix and return that prefix.

        The lookahead is matched and then computed again, in blocks of the request's own.
        """
        longest = self._last_boundary(request) if self._keeps_prefixes else 0
        for prefix in range(longest, 0, -self._layout.alignment):
            found = [
                (group, idx, self._kept.get((group, tuple(request.tokens[: (idx + 1) * spec.block_size]))))
                for group, spec in enumerate(self._specs)
                for idx in _blocks(spec, prefix, self._layout.groups[group].lookahead)
            ]
            if all(block for _, _, block in found):
                for group, idx, block in found:
                    if block and idx * self._specs[group].block_size < prefix:
                        request.tables[group][idx] = block
                        self._memory.pin(group, block)
                return prefix
        return 0
