"""A state machine that drives a store beside a dict."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hybridkv.stores.base import GetResult, ListsObjects, PutResult, ReportsStats
from hybridkv.testing.stores.workbench import FILL, MakeStore, Workbench, payload

_KEYS = [f"key/{idx}" for idx in range(8)]
_Batch = list[tuple[str, int, int]]


class _StoreMachine(RuleBasedStateMachine):
    """Drives a store beside a dict; ``run_store_machine`` makes the subclass with the settings."""

    make_store: MakeStore
    capacity_bytes: int | None
    object_bytes: Sequence[int]

    def __init__(self) -> None:
        super().__init__()
        self.bench = Workbench(type(self).make_store(self.capacity_bytes), 64 * max(self.object_bytes))
        self.model: dict[str, bytes] = {}
        self.num_puts = 0

    def teardown(self) -> None:
        self.bench.store.close()

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        """Put a batch; what vanished must have been in the way of what came."""
        batch = self._draw(data)
        payloads = [payload(self.num_puts + idx, size) for idx, (_, size, _) in enumerate(batch)]
        self.num_puts += len(batch)
        sources = [self.bench.source(new, num) for new, (_, _, num) in zip(payloads, batch, strict=True)]
        results = self.bench.store.put([key for key, _, _ in batch], sources)
        stored: dict[str, bytes] = {}
        for (key, size, _), new, result in zip(batch, payloads, results, strict=True):
            is_tight = self._overflows(_total(self.model) + _total(stored) + size)
            if key in stored or result is PutResult.ALREADY:
                assert result is PutResult.ALREADY
                assert key in stored or key in self.model
            elif result is PutResult.STORED:
                assert key not in self.model or is_tight
                stored[key] = new
            else:
                assert result is PutResult.REFUSED
                assert is_tight
        self._forget_evicted(stored)

    def _forget_evicted(self, stored: dict[str, bytes]) -> None:
        self.model.update(stored)
        found = dict(zip(_KEYS, self.bench.store.contains(_KEYS), strict=True))
        gone = {key for key in self.model if not found[key]}
        assert not gone & stored.keys()
        largest = max((len(self.model[key]) for key in gone), default=0)
        for key in gone:
            del self.model[key]
        assert not gone or self._overflows(_total(self.model) + largest)

    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        """Get a batch, with any size."""
        batch = self._draw(data)
        targets = [self.bench.lay_out(size, num) for _, size, num in batch]
        results = self.bench.store.get([key for key, _, _ in batch], targets)
        for (key, size, _), target, result in zip(batch, targets, results, strict=True):
            expected = self.model.get(key)
            if expected is None:
                assert result is GetResult.ABSENT
            elif len(expected) == size:
                assert (result, self.bench.read(target)) == (GetResult.OK, expected)
            else:
                assert (result, self.bench.read(target)) == (GetResult.CORRUPT, bytes([FILL]) * size)

    @rule(keys=st.lists(st.sampled_from(_KEYS), max_size=3))
    def discard(self, keys: list[str]) -> None:
        """Discard present and absent keys."""
        self.bench.store.discard(keys)
        for key in keys:
            self.model.pop(key, None)

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        """Compare contains, list and stats with the dict."""
        store = self.bench.store
        assert store.contains(_KEYS) == [key in self.model for key in _KEYS]
        assert not self._overflows(_total(self.model))
        if isinstance(store, ListsObjects):
            sizes = {key: len(data) for key, data in self.model.items()}
            assert {info.key: info.num_bytes for info in store.list()} == sizes
        if isinstance(store, ReportsStats):
            stats = store.stats()
            assert (stats.objects, stats.used_bytes) == (len(self.model), _total(self.model))

    def _draw(self, data: st.DataObject) -> _Batch:
        sizes, splits = st.sampled_from(self.object_bytes), st.integers(1, 3)
        return data.draw(st.lists(st.tuples(st.sampled_from(_KEYS), sizes, splits), max_size=5))

    def _overflows(self, num_bytes: int) -> bool:
        return self.capacity_bytes is not None and num_bytes > self.capacity_bytes


def _total(objects: dict[str, bytes]) -> int:
    return sum(map(len, objects.values()))


def run_store_machine(
    make_store: MakeStore,
    *,
    capacity_bytes: int | None = None,
    object_bytes: Sequence[int] = (16, 24, 40),
    max_examples: int = 50,
) -> None:
    """Drive a store beside a dict through random calls and compare after each of them.

    Without a capacity the store must equal the dict; with one, objects may vanish or be refused only where
    the dict's own sum of bytes shows that they do not fit together.

    Args:
        make_store: opens an empty store for every run.
        capacity_bytes: passed to ``make_store``.
        object_bytes: sizes to draw from; a store that rounds sizes up gets one size, its own.
        max_examples: runs of up to 30 calls.
    """
    attributes = {
        "make_store": staticmethod(make_store),
        "capacity_bytes": capacity_bytes,
        "object_bytes": object_bytes,
    }
    machine = type("StoreMachine", (_StoreMachine,), attributes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=30, deadline=None, report_multiple_bugs=False
        ),
    )
