"""Replays a request trace through the service, planner, keys and a store.

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
from hybridkv.service.lookup import Ending, LookupDriver
from hybridkv.service.messages import GroupTransfer, JobKind, WorkerReport
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.sim.naming import NAME_BYTES, NamedPrompt, Tails, UnitNamer
from hybridkv.sim.payload import PatternBytes, Payloads, SizesOnly
from hybridkv.sim.report import GroupReport, ReplayReport
from hybridkv.sim.trace import TraceRequest
from hybridkv.specs.layout import Layout
from hybridkv.stores.base import GetResult, PutResult, Store
from hybridkv.stores.memory import MemoryStore, open_memory
from hybridkv.stores.registry import open_store, parse_store_uri
from hybridkv.transfer.block_io import NULL_BLOCK
from hybridkv.transfer.moves import Ended, Outcome

_MAX_KEYS = 1 << 20  # one call a batch: the simulated round trips are those of the planner
_NO_LIMIT = 1 << 62


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
        self._side = SchedulerSide(
            self._driver,
            self._scheme,
            SchedulerSettings(retention=settings.retention, lookup_timeout_s=None, pinned_blocks=_NO_LIMIT),
        )
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
        lookups = self._driver.metrics()
        if lookups.endings.keys() - {Ending.EXACT}:
            raise StoreUnavailableError("the store failed during a lookup")
        self.report.keys_asked, self.report.keys_useful = lookups.keys_asked, lookups.keys_useful
        self.report.round_trips = lookups.calls
        return self.report

    def watch(self, request: TraceRequest) -> None:
        """Take note of a request that another replay of the same trace serves from the same store."""
        self._namer.name(request)

    def _serve(self, request: TraceRequest) -> None:
        prompt, num_tokens, report = self._namer.name(request), request.input_length, self.report
        request_id = f"line {request.line}"
        hit = self._side.find_hit(request_id, num_tokens, prompt.blob)
        self._side.allocated(request_id, self._tables(num_tokens, hit))
        self._work()
        every_block = self._tables(num_tokens)
        for stop in self._steps(hit, num_tokens):
            self._side.advanced(request_id, stop, every_block, states=self._states(num_tokens))
            self._work()
        self._side.forget(request_id)
        report.requests += 1
        report.prompt_tokens += num_tokens
        report.hit_tokens += hit
        report.full_attention_hit_tokens += _most_hit(self._full_attention, prompt, num_tokens)
        report.unbounded_hit_tokens += _most_hit(self._layout, prompt, num_tokens)

    def _tables(self, num_tokens: int, hit: int | None = None) -> list[NDArray[np.int64]]:
        """Return block tables as an engine has them: all blocks, or only what a resume at ``hit`` reads."""
        tables = []
        for group in self._layout.groups:
            size = group.spec.block_size
            need = range(num_tokens) if hit is None else group.spec.needed(hit)
            first, stop = need.start // size, (hit or num_tokens) // size
            table = np.arange(1 - first, 1 + stop - first)
            table[:first] = NULL_BLOCK
            tables.append(table)
        return tables

    def _states(self, num_tokens: int) -> range | None:
        """Return after how many tokens recurrent states exist: at every boundary without steps."""
        if self._settings.prefill_tokens is not None:
            return None
        return range(0, num_tokens + 1, self._layout.alignment)

    def _work(self) -> None:
        """Carry out what the scheduler side has planned, at once and on every rank."""
        ranks = range(self._layout.tp)
        for job in self._side.take_step().jobs:
            marks = [[self._move(job.kind, transfer, rank) for rank in ranks] for transfer in job.groups]
            for rank, of_rank in zip(ranks, zip(*marks, strict=True), strict=True):
                ended = Ended(job_id=job.job_id, outcome=Outcome.DONE, marks=of_rank)
                self._side.report(WorkerReport(rank=rank, ended=(ended,)))

    def _move(self, kind: JobKind, transfer: GroupTransfer, rank: int) -> bytes:
        group, counts = self._layout.spec_groups[transfer.spec_group], self.report.groups[transfer.spec_group]
        if rank >= group.num_ranks:  # a copy of another rank's bytes
            return bytes((kind is JobKind.SAVE,)) * transfer.num_objects
        keys = self._scheme.keys_of(group.index, rank, transfer.digests)
        object_bytes = self._object_bytes[group.index]
        if kind is JobKind.LOAD:
            counts.loaded_objects += len(keys)
            counts.loaded_bytes += len(keys) * object_bytes
            return self._load(keys, object_bytes)
        results = self._payloads.put(keys, object_bytes) if keys else []
        stored, held = results.count(PutResult.STORED), results.count(PutResult.ALREADY)
        counts.saved_objects += stored
        counts.saved_bytes += stored * object_bytes
        counts.refused_objects += len(results) - stored - held
        return bytes(result in (PutResult.STORED, PutResult.ALREADY) for result in results)

    def _load(self, keys: Sequence[str], object_bytes: int) -> bytes:
        results = self._payloads.get(keys, object_bytes) if keys else []
        for key, result in zip(keys, results, strict=True):
            if result is not GetResult.OK:
                raise CorruptPayloadError(f"object {key} was found and then answered {result.value!r}")
        return bytes(len(keys))

    def _steps(self, hit: int, num_tokens: int) -> Iterator[int]:
        """Yield where prefill steps end, as vLLM 0.32 cuts them for recurrent layers (its ``align`` mode).

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
            yield stop
            start = stop

    def _count_evictions(self, evicted: Sequence[tuple[str, int]]) -> None:
        for key, num_bytes in evicted:
            counts = self.report.groups[spec_group_of(key)]
            counts.evicted_objects += 1
            counts.evicted_bytes += num_bytes


def _most_hit(layout: Layout, prompt: NamedPrompt, num_tokens: int) -> int:
    """Return what an unbounded store with retention ``all`` would hit, by what the prompt shares."""
    return min(largest_candidate(layout, prompt.shared), resend_boundary(layout, num_tokens))
