"""Each way in which a store can fail, under a serving engine: docs/faults.md is this table in words."""

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.memory import MemoryStore
from hybridkv.transfer.guard import GuardSettings
from tests.service.test_outputs import MOVER, Pair, layout_of, prompt_of

QUICK = replace(MOVER, slot_timeout_s=0.2, guard=GuardSettings(timeout_s=0.2, failures_to_open=3, open_s=0.2))


LOOKUP_ERRORS = {"gone": StoreUnavailableError("gone"), "bug": ZeroDivisionError}


class Failing(MemoryStore):
    """A memory store that fails in one way while ``is_failing``; its method of the same name says how."""

    def __init__(self, how):
        super().__init__()
        self.how, self.is_failing, self.num_faults = how, False, 0
        self.release = threading.Event()

    def put(self, keys, sources, _hints=None):
        return self._do("put", super().put, keys, sources)

    def get(self, keys, targets):
        return self._do("get", super().get, keys, targets)

    def contains(self, keys):
        if self.is_failing and self.how in LOOKUP_ERRORS:
            self.num_faults += 1
            raise LOOKUP_ERRORS[self.how]
        return super().contains(keys)

    def _do(self, what, call, keys, segments):
        if not self.is_failing or (fault := getattr(self, self.how)) is None:
            return call(keys, segments)
        return fault(what, call, keys, segments)

    def error(self, _what, _call, _keys, _segments):
        self.num_faults += 1
        raise StoreUnavailableError("error")

    gone = error

    def bug(self, _what, _call, _keys, _segments):
        self.num_faults += 1
        raise ZeroDivisionError

    def thread_ends(self, _what, _call, _keys, _segments):
        self.num_faults += 1
        raise SystemExit

    def short_read(self, what, call, keys, segments):
        if what == "get":
            self.num_faults += 1
            shorter = [[(address, num_bytes - 1)] for ((address, num_bytes),) in segments]
            return call(keys, shorter)
        return call(keys, segments)

    def wrong_bytes(self, what, call, keys, segments):
        results = call(keys, segments)
        if what == "get":
            self.num_faults += 1
            results[-1] = GetResult.CORRUPT
        return results

    def late(self, _what, call, keys, segments):
        self.num_faults += 1
        self.release.wait()
        return call(keys, segments)

    def full(self, what, call, keys, segments):
        if what == "put":
            self.num_faults += 1
            return [PutResult.REFUSED] * len(keys)
        return call(keys, segments)

    def partial(self, what, call, keys, segments):
        results = call(keys[:1], segments[:1])
        self.num_faults += 1
        rest = PutResult.REFUSED if what == "put" else GetResult.ABSENT
        return results + [rest] * (len(keys) - 1)


HOW = ["error", "gone", "bug", "thread_ends", "short_read", "wrong_bytes", "late", "full", "partial"]


@pytest.mark.parametrize("how", HOW)
def test_outputs_stay_right_nothing_hangs_and_nothing_stays_held(how):
    rng = random.Random(8)
    threads = threading.active_count()
    store = Failing(how)
    pair = Pair(layout_of("all kinds"), store, mover=QUICK)
    announced = []
    report = pair.connector.side.report

    def noting(message):
        progress = report(message)
        announced.extend(progress.stored)
        return progress

    pair.connector.side.report = noting
    first = prompt_of(rng, 100)
    assert pair.serve("first", first) == 0
    store.is_failing = True
    started = time.monotonic()
    for idx in range(3):
        pair.serve(f"failing-{idx}", first[: 70 + 10 * idx] + prompt_of(rng, 30))
    assert time.monotonic() - started < 30, "three requests took longer than their deadlines allow"
    assert store.num_faults > 0
    store.is_failing = False
    store.release.set()
    time.sleep(QUICK.guard.open_s)
    assert pair.serve("warm", first + prompt_of(rng, 1)) >= 0  # closes the breaker where it was open
    assert pair.serve("after", first) > 0, "the store is used again once it answers"
    for event in announced:
        keys = pair.connector.side._scheme.keys_of(event.spec_group, 0, event.block_hashes)
        assert all(store.contains(keys)) or how in ("short_read", "wrong_bytes"), "corrupt ones are discarded"
    deadline = time.monotonic() + 20
    while any(worker.metrics().slots_held for worker in pair.connector.workers):
        assert time.monotonic() < deadline, "a staging slot did not come back"
        time.sleep(0.01)
    pair.close()
    deadline = time.monotonic() + 20
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)


def test_a_store_that_fails_for_one_group_only_fails_the_load_as_a_whole():
    class OneGroup(MemoryStore):
        def get(self, keys, targets):
            results = super().get(keys, targets)
            return [GetResult.FAILED] * len(keys) if keys[0].split("/")[2] == "1" else results

    rng = random.Random(9)
    pair = Pair(layout_of("full, window"), OneGroup(), mover=QUICK)
    first = prompt_of(rng, 100)
    pair.serve("first", first)
    pair.submit("again", first)
    pair.run()
    hits = pair.engine.outputs["again"].hits
    assert hits[0] > 0
    assert hits[-1] == 0, "what was missed counts as absent for this request"
    assert list(hits) == sorted(hits, reverse=True)
    assert np.isfinite(pair.engine.outputs["again"].logits).all()
    pair.compare("again")
    pair.close()
