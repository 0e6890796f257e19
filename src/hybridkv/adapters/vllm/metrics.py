"""What both roles count, on its way through vLLM's statistics to its log and to Prometheus.

Each role reports what was added since its last report; vLLM sums the counters over ranks and steps. A gauge
is the latest value of one role, which its label names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.service.lookup import LookupMetrics
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.stores.wrappers.metered import MeteredStore, Operation
from hybridkv.transfer.moves import MoverMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:hybridkv_"
OPERATIONS: tuple[Operation, ...] = ("contains", "put", "get", "discard")

Values = dict[str, dict[str, float]]
"""Values by metric and by label value; "" where a metric has no label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of ``METRICS``.

    Attributes:
        meaning: its documentation.
        label: name of its only label beside vLLM's; empty = none.
        is_gauge: whether it may fall.
    """

    meaning: str
    label: str = ""
    is_gauge: bool = False


METRICS: dict[str, Metric] = {
    "lookups": Metric(meaning="Lookups, by how they ended: exact, deadline or failed", label="ending"),
    "lookup_keys": Metric(meaning="Keys that lookups asked for, all ranks together"),
    "lookup_useful_keys": Metric(meaning="Keys among them that were then to be loaded"),
    "lookup_calls": Metric(meaning="Round trips of lookups to the store"),
    "lookup_seconds": Metric(meaning="Seconds that lookups took"),
    "hit_tokens": Metric(meaning="Tokens that were loaded, or were to be"),
    "loads": Metric(meaning="Loads that were started"),
    "failed_loads": Metric(meaning="Loads that did not fill all their blocks"),
    "unfilled_blocks": Metric(meaning="Blocks that vLLM allocated otherwise than planned: bugs"),
    "errors": Metric(meaning="Requests that were left alone after an error of hybridkv: bugs"),
    "stored_objects": Metric(meaning="Objects that saves have stored, or found stored, on every rank"),
    "cut_saves": Metric(meaning="Times that a save had to wait for pinned blocks"),
    "store_calls": Metric(meaning="Store calls", label="operation"),
    "store_keys": Metric(meaning="Keys of store calls", label="operation"),
    "store_bytes": Metric(meaning="Bytes that were stored or served", label="operation"),
    "store_seconds": Metric(meaning="Seconds inside store calls", label="operation"),
    "store_results": Metric(meaning="Results of store calls, one a key", label="result"),
    "store_failures": Metric(meaning="Store calls that raised, were late, or were spared", label="kind"),
    "pinned_blocks": Metric(meaning="Blocks of the engine that jobs hold", is_gauge=True),
    "jobs": Metric(meaning="Jobs under way on a rank", label="rank", is_gauge=True),
    "queued_saves": Metric(meaning="Saves that wait on a rank", label="rank", is_gauge=True),
    "queued_loads": Metric(meaning="Loads that wait on a rank", label="rank", is_gauge=True),
    "staging_bytes": Metric(meaning="Staging memory in use on a rank", label="rank", is_gauge=True),
}
"""Every metric, by the name that follows ``PREFIX``."""


def scheduler_values(
    side: SchedulerSide, lookups: LookupMetrics, store: MeteredStore, *, num_errors: int
) -> Values:
    """Return the totals of the scheduler role."""
    counters = side.counters
    return {
        "lookups": {ending.value: float(count) for ending, count in lookups.endings.items()},
        "lookup_keys": {"": lookups.keys_asked},
        "lookup_useful_keys": {"": lookups.keys_useful},
        "lookup_calls": {"": lookups.calls},
        "lookup_seconds": {"": lookups.seconds},
        "hit_tokens": {"": counters.hit_tokens},
        "loads": {"": counters.loads},
        "failed_loads": {"": counters.loads_failed},
        "unfilled_blocks": {"": counters.unfilled_blocks},
        "errors": {"": num_errors},
        "stored_objects": {"": counters.objects_stored},
        "cut_saves": {"": counters.saves_cut},
        "pinned_blocks": {"": side.num_pinned},
        **_store_values(store),
    }


def worker_values(mover: MoverMetrics, store: MeteredStore, *, rank: int) -> Values:
    """Return the totals of a worker role."""
    values = _store_values(store)
    values["store_failures"] |= {"late": mover.calls.late, "spared": mover.calls.refused}
    return values | {
        "jobs": {str(rank): mover.jobs},
        "queued_saves": {str(rank): mover.queued_saves},
        "queued_loads": {str(rank): mover.queued_loads},
        "staging_bytes": {str(rank): mover.staging_bytes_held},
    }


def _store_values(store: MeteredStore) -> Values:
    counts = {operation: store.counts(operation) for operation in OPERATIONS}
    return {
        "store_calls": {operation: one.calls for operation, one in counts.items()},
        "store_keys": {operation: one.num_keys for operation, one in counts.items()},
        "store_bytes": {operation: one.num_bytes for operation, one in counts.items()},
        "store_seconds": {operation: one.seconds for operation, one in counts.items()},
        "store_results": {
            f"{operation} {result}": count
            for operation, one in counts.items()
            for result, count in one.results.items()
        },
        "store_failures": {"raised": sum(one.errors for one in counts.values())},
    }


class HybridKVStats(KVConnectorStats):
    """Counters of an interval and the latest gauges, as ``Values`` in ``data``."""

    def reset(self) -> None:
        """Forget all."""
        self.data: Values = {}

    def aggregate(self, other: KVConnectorStats) -> "HybridKVStats":
        """Add another role's or a later interval's values, and return this."""
        for name, of_labels in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, value in of_labels.items():
                mine[label] = value if METRICS[name].is_gauge else mine.get(label, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one value a metric and label, for vLLM's log."""
        return {
            f"{name} {label}".strip().replace(" ", "_"): round(value, 6)
            for name, of_labels in self.data.items()
            for label, value in of_labels.items()
        }

    def is_empty(self) -> bool:
        """Return whether nothing is to be told."""
        return not self.data


class Reporter:
    """Turns totals into what was added since the last report."""

    def __init__(self) -> None:
        self._last: Values = {}

    def report(self, totals: Values) -> HybridKVStats | None:
        """Return what has changed; ``None`` where nothing has."""
        changed: Values = {}
        for name, of_labels in totals.items():
            last = self._last.get(name, {})
            for label, value in of_labels.items():
                if value != last.get(label, 0):
                    added = value if METRICS[name].is_gauge else value - last.get(label, 0)
                    changed.setdefault(name, {})[label] = added
        self._last = totals
        return HybridKVStats(data=changed) if changed else None


class HybridKVPromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's Prometheus registry, each with vLLM's labels and its own."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: self._registered(name, metric) for name, metric in METRICS.items()}

    def _registered(self, name: str, metric: Metric) -> Counter | Gauge:
        labels = [*self._labelnames, *([metric.label] if metric.label else [])]
        if metric.is_gauge:
            return self._gauge_cls(
                name=PREFIX + name,
                documentation=metric.meaning,
                labelnames=labels,
                multiprocess_mode="mostrecent",
            )
        return self._counter_cls(name=PREFIX + name, documentation=metric.meaning, labelnames=labels)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record a report of one engine."""
        for name, of_labels in transfer_stats_data.items():
            metric, is_labelled = self._metrics[name], bool(METRICS[name].label)
            for label, value in of_labels.items():
                labels = [*self.per_engine_labelvalues[engine_idx], *([label] if is_labelled else [])]
                of_label = metric.labels(*labels)
                if METRICS[name].is_gauge:
                    of_label.set(value)
                elif value > 0:
                    of_label.inc(value)
