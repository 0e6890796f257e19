"""Examples of what a store gives back."""

import random
from concurrent.futures import ThreadPoolExecutor

from hybridkv.stores.base import MAX_KEY_CHARS, GetResult, PutHint, PutResult, Store
from hybridkv.testing.stores.workbench import FILL, StoreExamples, Workbench, payload


class ContentTests(StoreExamples):
    """Objects go in, come back as they were, and stay what they are."""

    def test_an_object_comes_back_as_it_was_put(self) -> None:
        """One segment in, one segment out."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            assert bench.put("a", data) is PutResult.STORED
            assert bench.get("a", len(data)) == (GetResult.OK, data)

    def test_segments_are_concatenated_in_their_order(self) -> None:
        """Any split on put, another one on get."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            for num_put, num_get in [(1, 7), (7, 1), (7, 7), (7, 3)]:
                key = f"{num_put}/{num_get}"
                assert bench.put(key, data, num_put) is PutResult.STORED
                assert bench.get(key, len(data), num_get) == (GetResult.OK, data)

    def test_one_source_may_serve_many_keys(self) -> None:
        """The very same segments object repeated in a batch."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            source = bench.source(data, 3)
            assert bench.store.put(["a", "b", "c"], [source] * 3) == [PutResult.STORED] * 3
            assert [bench.get(key, len(data)) for key in "abc"] == [(GetResult.OK, data)] * 3

    def test_changing_a_source_after_put_changes_no_object(self) -> None:
        """The store copies; it keeps no view of the source."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            source = bench.source(data)
            bench.store.put(["a"], [source])
            bench.write(source, bytes(len(data)))
            assert bench.get("a", len(data)) == (GetResult.OK, data)

    def test_changing_a_target_after_get_changes_no_object(self) -> None:
        """The store copies; it keeps no view of the target."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            bench.put("a", data)
            target = bench.lay_out(len(data))
            bench.store.get(["a"], [target])
            bench.write(target, bytes(len(data)))
            assert bench.get("a", len(data)) == (GetResult.OK, data)

    def test_a_batch_answers_for_each_key(self) -> None:
        """Present, absent and present again, in the order of the keys."""
        one, two = payload(1, self.object_bytes), payload(2, self.object_bytes)
        with self.workbench() as bench:
            sources = [bench.source(one), bench.source(two, 2)]
            assert bench.store.put(["a", "b"], sources) == [PutResult.STORED] * 2
            assert bench.store.contains(["b", "x", "a", "b"]) == [True, False, True, True]
            targets = [bench.lay_out(self.object_bytes) for _ in range(3)]
            results = bench.store.get(["b", "x", "a"], targets)
            assert results == [GetResult.OK, GetResult.ABSENT, GetResult.OK]
            assert (bench.read(targets[0]), bench.read(targets[2])) == (two, one)

    def test_an_empty_batch_is_answered_with_nothing(self) -> None:
        """All methods, no keys."""
        with self.workbench() as bench:
            assert bench.store.contains([]) == []
            assert bench.store.put([], []) == []
            assert bench.store.put([], [], []) == []
            assert bench.store.get([], []) == []
            bench.store.discard([])

    def test_a_second_put_keeps_the_first_bytes(self) -> None:
        """Also when the second object has another size."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            bench.put("a", data)
            assert bench.put("a", payload(1, self.object_bytes)) is PutResult.ALREADY
            assert bench.put("a", payload(2, self.object_bytes - 1)) is PutResult.ALREADY
            assert bench.get("a", len(data)) == (GetResult.OK, data)

    def test_the_first_of_two_twins_in_a_batch_is_stored(self) -> None:
        """The second is told that the key was taken."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            sources = [bench.source(data), bench.source(payload(1, self.object_bytes))]
            assert bench.store.put(["a", "a"], sources) == [PutResult.STORED, PutResult.ALREADY]
            assert bench.get("a", len(data)) == (GetResult.OK, data)

    def test_a_discarded_object_is_gone_and_may_be_put_anew(self) -> None:
        """The new bytes count."""
        new = payload(1, self.object_bytes)
        with self.workbench() as bench:
            bench.put("a", payload(0, self.object_bytes))
            bench.put("b", payload(2, self.object_bytes))
            bench.store.discard(["a", "absent", "a"])
            assert bench.store.contains(["a", "b"]) == [False, True]
            assert bench.get("a", self.object_bytes)[0] is GetResult.ABSENT
            assert bench.put("a", new) is PutResult.STORED
            assert bench.get("a", len(new)) == (GetResult.OK, new)

    def test_a_target_of_another_size_is_corrupt_and_stays_untouched(self) -> None:
        """One byte less, one byte more; the neighbour in the batch is served."""
        data = payload(0, self.object_bytes)
        with self.workbench() as bench:
            bench.put("a", data)
            sizes = [len(data) - 1, len(data), len(data) + 1]
            targets = [bench.lay_out(size, 2) for size in sizes]
            results = bench.store.get(["a"] * 3, targets)
            assert results == [GetResult.CORRUPT, GetResult.OK, GetResult.CORRUPT]
            fill = [bytes([FILL]) * size for size in sizes]
            assert [bench.read(target) for target in targets] == [fill[0], data, fill[2]]

    def test_every_legal_key_is_accepted(self) -> None:
        """The shortest, the longest, every character."""
        characters = "".join(map(chr, range(0x21, 0x7F)))
        keys = ["/", "x" * MAX_KEY_CHARS, characters, "../up", "%2e", "a/b", "a", "A"]
        with self.workbench() as bench:
            for key in keys:
                assert bench.put(key, payload(key, self.object_bytes)) is PutResult.STORED
            for key in keys:
                data = payload(key, self.object_bytes)
                assert bench.get(key, len(data)) == (GetResult.OK, data)

    def test_hints_are_accepted(self) -> None:
        """And change no result."""
        with self.workbench() as bench:
            hints = [
                PutHint(parent=None, prefix=16, spec_group=0, kept_boundary=False),
                PutHint(parent="a", prefix=32, spec_group=0, kept_boundary=True),
            ]
            source = bench.source(payload(0, self.object_bytes))
            assert bench.store.put(["a", "b"], [source] * 2, hints) == [PutResult.STORED] * 2
            assert bench.store.put(["b", "c"], [source] * 2, hints) == [PutResult.ALREADY, PutResult.STORED]

    def test_threads_get_exactly_what_was_put(self) -> None:
        """Puts, gets and discards of the same few keys, and evictions where the capacity can be set."""
        with self.workbench(bounded=self.capacity_objects is not None) as bench:
            with ThreadPoolExecutor(4) as pool:
                runs = [pool.submit(self._hammer, bench.store, thread) for thread in range(4)]
            assert sum(run.result() for run in runs) > 0

    def _hammer(self, store: Store, thread: int) -> int:
        """Work on the store as one of several threads and return how many gets were served."""
        bench = Workbench(store, 64 * self.object_bytes)
        chance = random.Random(thread)  # noqa: S311 - reproducible, not secret
        served = 0
        for _ in range(200):
            keys = chance.sample([f"shared/{idx}" for idx in range(6)], 3)
            expected = [payload(key, self.object_bytes) for key in keys]
            store.put(keys, [bench.source(data, 3) for data in expected])
            targets = [bench.lay_out(self.object_bytes, 2) for _ in keys]
            for data, target, result in zip(expected, targets, store.get(keys, targets), strict=True):
                assert result in {GetResult.OK, GetResult.ABSENT}
                if result is GetResult.OK:
                    assert bench.read(target) == data
                    served += 1
            store.discard([chance.choice(keys)])
        return served
