"""Replays a request trace through planner, keys and a store.

Requests come one after the other in file order, each save done before the next lookup, on an engine whose
device is empty (p0 = 0). What the first requests leave in the store is what later ones can hit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, CorruptPayloadError, StoreUnavailableError
from hybridkv.keys import KeyScheme, Namespace, spec_group_of
from hybridkv.plan.boundaries import (
    Retention,
    check_retention,
    largest_candidate,
    resend_boundary,
)
from hybridkv.plan.save import GroupSave, plan_save
from hybridkv.service.lookup import Ending, LookupDriver
from hybridkv.sim.naming import NAME_BYTES, NamedPrompt, Tails, UnitNamer
from hybridkv.sim.payload import PatternBytes, Payloads, SizesOnly
from hybridkv.sim.report import GroupReport, ReplayReport
from hybridkv.sim.trace import TraceRequest
from hybridkv.specs.layout import Layout
from hybridkv.stores.base import GetResult, PutResult, Store
from hybridkv.stores.memory import MemoryStore, open_memory
from hybridkv.stores.registry import open_store, parse_store_uri

_MAX_KEYS = 1 << 20  # one call a batch: the simulated round trips are those of the planner


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is replayed.

    Attributes:
        layout: of the model.
        store_uri: where objects go.
        retention: which boundaries are kept.
        tails: how partial last blocks of the trace are named.
        prefill_tokens: tokens a prefill step computes at most; ``None`` = the whole prompt in one step, with
            recurrent states at every boundary.
        move_bytes: whether real bytes move and are verified.
        payload_scale: factor on every object's size, (0, 1].
    """

    layout: Layout
    store_uri: str
    retention: Retention = "all"
    tails: Tails = "distinct"
    prefill_tokens: int | None = None
    move_bytes: bool = False
    payload_scale: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        check_retention(self.retention, self.layout)
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise ConfigError(f"prefill tokens is {self.prefill_tokens}; give an integer >= 1")
        if not 0 < self.payload_scale <= 1:
            raise ConfigError(
                f"payload scale is {self.payload_scale}; give a fraction in (0, 1], such as 1/64"
            )


class Replay:
    """One replay: feed it requests in order, then read ``report``.

    Args:
        settings: how to replay.

    Raises:
        ConfigError: the store cannot hold a single object, or cannot replay without bytes.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self._layout = layout = settings.layout
        dense = tuple(group for group in layout.groups if group.spec.downward_closed)
        self._full_attention = replace(layout, groups=dense) if dense else layout
        self._object_bytes = [ceil(g.object_bytes * settings.payload_scale) for g in layout.spec_groups]
        self._namer = UnitNamer(settings.tails, layout.hash_unit)
        namespace = Namespace(model_version=f"trace/{layout.name}")
        self._scheme = KeyScheme(namespace, layout, digest_bytes=NAME_BYTES)
        self._store, self._payloads = self._open(settings.store_uri)
        self._driver = LookupDriver(self._store, self._scheme, max_keys=_MAX_KEYS)
        self.report = self._empty_report()

    def _open(self, text: str) -> tuple[Store, Payloads]:
        uri, largest = parse_store_uri(text), max(self._object_bytes)
        if uri.scheme != "memory":
            store = open_store(text)
            if not self._settings.move_bytes:
                store.close()
                raise ConfigError(
                    f"a replay without bytes needs a memory:// store, not {uri.scheme}://; add --bytes"
                )
            return store, PatternBytes(store, largest)
        if self._settings.move_bytes and "capacity" not in uri.query:
            raise ConfigError("a replay with bytes needs a bounded store; write memory://?capacity=2GiB")
        memory = open_memory(uri, keep_payloads=self._settings.move_bytes, on_evict=self._count_evictions)
        capacity = memory.stats().capacity_bytes
        if capacity is not None and capacity < largest:
            raise ConfigError(
                f"capacity {capacity} bytes is smaller than one object of {largest} bytes of layout "
                f"{self._layout.name!r}; raise the capacity or lower the payload scale"
            )
        return memory, PatternBytes(memory, largest) if self._settings.move_bytes else SizesOnly(memory)

    def _empty_report(self) -> ReplayReport:
        settings, layout = self._settings, self._layout
        recurrent = any(group.spec.written_only_at_step_end for group in layout.spec_groups)
        if not recurrent:
            states = "no recurrent states"
        elif settings.prefill_tokens is None:
            states = "states at every boundary"
        else:
            states = "states where a step ended"
        return ReplayReport(
            model=layout.name,
            store=settings.store_uri,
            tp=layout.tp,
            retention=settings.retention,
            tails=settings.tails,
            prefill_tokens=settings.prefill_tokens,
            payload_scale=str(settings.payload_scale),
            bytes_verified=settings.move_bytes,
            states=states,
            evicted_known=isinstance(self._store, MemoryStore),
            groups=[GroupReport(name=g.name, kind=g.spec.kind) for g in layout.spec_groups],
        )

    def run(self, requests: Iterable[TraceRequest]) -> ReplayReport:
        """Replay requests and close the store.

        Raises:
            CorruptPayloadError: a loaded object is not what was saved.
        """
        try:
            for request in requests:
                self._serve(request)
        finally:
            self._driver.close()
            self._store.close()
        return self.report

    def _serve(self, request: TraceRequest) -> None:
        prompt, num_tokens, report = self._namer.name(request), request.input_length, self.report
        outcome = self._driver.lookup(num_tokens, prompt.blob)
        found, hit = outcome.result, outcome.result.hit
        if outcome.ending is not Ending.EXACT:
            raise StoreUnavailableError("the store failed during a lookup")
        self._load(prompt, found.loads)
        junction = found.full_run if found.full_run > hit else 0
        for start, stop in self._steps(hit, num_tokens):
            plans = plan_save(
                self._layout,
                retention=self._settings.retention,
                start=start,
                stop=stop,
                num_tokens=num_tokens,
                junction=junction,
            )
            self._save(prompt, plans, stop)
        report.requests += 1
        report.keys_asked += sum(found.keys_asked)
        report.keys_useful += sum(found.keys_useful)
        report.round_trips += outcome.calls
        report.prompt_tokens += num_tokens
        report.hit_tokens += hit
        report.full_attention_hit_tokens += _most_hit(self._full_attention, prompt, num_tokens)
        report.unbounded_hit_tokens += _most_hit(self._layout, prompt, num_tokens)

    def _load(self, prompt: NamedPrompt, loads: Sequence[range]) -> None:
        for group, objects in zip(self._layout.spec_groups, loads, strict=True):
            for rank in range(group.num_ranks):
                keys = self._scheme.keys(group.index, rank, objects, prompt.blob)
                results = self._payloads.get(keys, self._object_bytes[group.index]) if keys else []
                for key, result in zip(keys, results, strict=True):
                    if result is not GetResult.OK:
                        raise CorruptPayloadError(
                            f"object {key} was found and then answered {result.value!r}"
                        )
                counts = self.report.groups[group.index]
                counts.loaded_objects += len(keys)
                counts.loaded_bytes += len(keys) * self._object_bytes[group.index]

    def _steps(self, hit: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the prefill steps as vLLM 0.32 cuts them for recurrent layers (its ``align`` mode).

        A step that does not finish the prompt ends at a multiple of the alignment where it can, and the last
        such multiple below the end is always a step's end.
        """
        limit, align = self._settings.prefill_tokens, self._layout.alignment
        last = resend_boundary(self._layout, num_tokens)
        start = hit
        while start < num_tokens:
            stop = num_tokens if limit is None else min(start + limit, num_tokens)
            if limit is not None and stop < num_tokens and stop // align * align > start:
                stop = stop // align * align
            if limit is not None and start < last < stop:
                stop = last
            yield start, stop
            start = stop

    def _save(self, prompt: NamedPrompt, plans: Sequence[GroupSave], stop: int) -> None:
        for group, plan in zip(self._layout.spec_groups, plans, strict=True):
            objects: NDArray[np.int64] = plan.indices()
            if group.spec.written_only_at_step_end and self._settings.prefill_tokens is not None:
                objects = objects[(objects + 1) * group.object_size == stop]
            counts, object_bytes = self.report.groups[group.index], self._object_bytes[group.index]
            for rank in range(group.num_ranks):
                keys = self._scheme.keys(group.index, rank, objects, prompt.blob)
                results = self._payloads.put(keys, object_bytes) if keys else []
                stored = results.count(PutResult.STORED)
                counts.saved_objects += stored
                counts.saved_bytes += stored * object_bytes
                counts.refused_objects += len(results) - stored - results.count(PutResult.ALREADY)

    def _count_evictions(self, evicted: Sequence[tuple[str, int]]) -> None:
        for key, num_bytes in evicted:
            counts = self.report.groups[spec_group_of(key)]
            counts.evicted_objects += 1
            counts.evicted_bytes += num_bytes


def _most_hit(layout: Layout, prompt: NamedPrompt, num_tokens: int) -> int:
    """Return what an unbounded store with retention ``all`` would hit, by what the prompt shares."""
    return min(largest_candidate(layout, prompt.shared), resend_boundary(layout, num_tokens))
