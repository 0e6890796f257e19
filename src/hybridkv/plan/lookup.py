"""Lookup with the least work: the exact hit, asking for little more than what will be loaded.

The search never touches a store. It yields steps of independent ``Ask``s; a driver sends them and hands the
answers back with ``learn``; ``result`` tells the hit. What makes few keys enough:

1. Nothing below the device's prefix is asked, and nothing at all when no candidate lies above it.
2. An absent object is a proof: it rules out every candidate whose need holds it. In a downward-closed group
   a few dozen evenly spread *sentinels* find the end of the run; only what will be loaded is asked in full.
3. Windows and states are tried from the top down: all their tails at the bound in one step; after a miss,
   one sentinel for each candidate that is not ruled out yet, in one group, ``PROOFS`` at a time.
4. One rank answers first; the others are asked only about what will be loaded.

::

    0         p0                     hit            bound           top   N
    |---------|======================|--------------|---------------|-----|
      device    asked in full, loaded  one proof a     ruled out by an
                                       candidate       absent sentinel
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, StoreError
from hybridkv.plan.boundaries import resend_boundary
from hybridkv.plan.load import plan_load
from hybridkv.plan.presence import longest_hit
from hybridkv.specs.group import SpecGroup
from hybridkv.specs.layout import Layout

SENTINELS = 24
"""Objects that one step of the search for the end of a run spreads over the open interval."""
PROOFS = 48
"""Sentinels of one step downwards: so many keys cost about what the step's round trip costs."""
FEW = 64
"""Where a step stays below this many keys, it asks at once what the next one would."""

_ABSENT, _PRESENT, _UNKNOWN = 0, 1, 2
_ANSWERS = bytes((_ABSENT, _PRESENT))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """Objects whose presence is asked of one rank namespace of one spec group.

    Attributes:
        spec_group: index of the spec group.
        rank: rank namespace.
        objects: int64, ascending.
    """

    spec_group: int
    rank: int
    objects: NDArray[np.int64]

    def split(self, count: int) -> tuple["Ask", "Ask"]:
        """Return the same ask in two: its first ``count`` objects, and the rest, maybe none."""
        return replace(self, objects=self.objects[:count]), replace(self, objects=self.objects[count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHole:
    """An object that the first rank namespace holds and another one lacks: absent, and worth repairing."""

    spec_group: int
    rank: int
    object_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """What a lookup found.

    Attributes:
        hit: tokens to resume from; the device's prefix where the store adds nothing. The best boundary
            proven so far while the search has not ended.
        full_run: tokens up to the first object that a downward-closed group is known to lack: the
            junction of a save; 0 without such a group.
        loads: per spec group the objects to load.
        keys_asked: per spec group, all ranks together.
        keys_useful: per spec group, those of them that ``loads`` needs.
        steps: round trips, where each step is sent at once.
        rank_holes: objects to repair.
    """

    hit: int
    full_run: int
    loads: tuple[range, ...]
    keys_asked: tuple[int, ...]
    keys_useful: tuple[int, ...]
    steps: int
    rank_holes: tuple[RankHole, ...]


class _Known:
    """What is known of one spec group's objects: a byte for each object and rank, nothing below ``base``."""

    def __init__(self, group: SpecGroup, num_objects: int, device_prefix: int) -> None:
        self.group, self.num_objects = group, num_objects
        self.base = device_prefix // group.object_size
        self._states: dict[int, bytearray] = {}

    def states(self, rank: int) -> bytearray:
        """Return a rank's states, one byte an object."""
        if rank not in self._states:
            self._states[rank] = bytearray((_UNKNOWN,)) * self.num_objects
        return self._states[rank]

    def need(self, boundary: int) -> tuple[int, int]:
        """Return start and stop of what ``boundary`` needs above the device, lookahead included."""
        need = self.group.needed_objects(boundary, self.group.lookahead)
        return max(need.start, self.base), max(need.stop, self.base)

    def unknown(self, rank: int, boundary: int) -> NDArray[np.int64]:
        """Return the objects that ``boundary`` needs and nobody has asked this rank for."""
        start, stop = self.need(boundary)
        return np.flatnonzero(np.frombuffer(self.states(rank), np.uint8)[start:stop] == _UNKNOWN) + start

    def first_absent(self, start: int, stop: int) -> int | None:
        """Return the first object of the interval that some rank is known to lack."""
        found = [states.find(_ABSENT, start, stop) for states in self._states.values()]
        return min((idx for idx in found if idx >= 0), default=None)

    def present(self) -> NDArray[np.bool_]:
        """Return which objects every rank is known to hold; what the device holds counts."""
        held = np.ones(self.num_objects, np.bool_)
        for rank in range(self.group.num_ranks):
            held &= np.frombuffer(self.states(rank), np.uint8) == _PRESENT
        held[: self.base] = True
        return held

    def num_asked(self, start: int, stop: int) -> int:
        """Return how many objects of the interval were asked, all ranks together."""
        return sum(stop - start - states.count(_UNKNOWN, start, stop) for states in self._states.values())

    def rank_holes(self) -> Iterator["RankHole"]:
        """Yield what the first rank holds and another one lacks."""
        first = np.frombuffer(self.states(0), np.uint8) == _PRESENT
        for rank, states in self._states.items():
            for idx in np.flatnonzero(first & (np.frombuffer(states, np.uint8) == _ABSENT)).tolist():
                yield RankHole(spec_group=self.group.index, rank=rank, object_idx=idx)


class Lookup:
    """One search for the longest legal prefix of a prompt.

    Args:
        layout: of the model.
        num_tokens: N, the prompt's length, >= 0.
        device_prefix: p0, tokens that the device holds in every group, in [0, N].

    Raises:
        ConfigError: not 0 <= p0 <= N.

    Example:
        >>> from hybridkv.specs.layout_file import find_layout
        >>> search = Lookup(find_layout("llama-3.1-8b"), 65)
        >>> for asks in search.steps():
        ...     for ask in asks:
        ...         search.learn(ask, (ask.objects < 3).tolist())
        >>> search.result().hit
        48
    """

    def __init__(self, layout: Layout, num_tokens: int, *, device_prefix: int = 0) -> None:
        if not 0 <= device_prefix <= num_tokens:
            raise ConfigError(f"device prefix {device_prefix} of {num_tokens} tokens; give 0 <= p0 <= N")
        self._layout, self._num_tokens, self._device_prefix = layout, num_tokens, device_prefix
        self._known = [
            _Known(group, num_tokens // group.object_size, device_prefix) for group in layout.spec_groups
        ]
        self._dense = [known for known in self._known if known.group.spec.downward_closed]
        self._sparse = [known for known in self._known if not known.group.spec.downward_closed]
        self._bound = resend_boundary(layout, num_tokens)
        self._num_steps = 0
        self._hit: int | None = None

    def steps(self) -> Iterator[list[Ask]]:
        """Yield what to ask next; every ask is answered by ``learn`` before the next step is taken."""
        for asks in self._search():
            self._num_steps += 1
            yield asks

    def learn(self, ask: Ask, answers: Sequence[bool]) -> None:
        """Take the answers to an ask, or to a piece of one.

        Args:
            ask: what was asked.
            answers: for each object whether it is present.

        Raises:
            StoreError: the answers are not one bool for each object.
        """
        try:
            said = bytes(answers) if len(answers) == len(ask.objects) else b""
        except (TypeError, ValueError):
            said = b""
        if len(said) != len(ask.objects) or said.translate(None, _ANSWERS):
            raise StoreError(f"a store did not answer {len(ask.objects)} keys with one bool each")
        states, first, last = self._known[ask.spec_group].states(ask.rank), ask.objects[0], ask.objects[-1]
        if last - first + 1 == len(said):
            states[first : last + 1] = said
        else:
            np.frombuffer(states, np.uint8)[ask.objects] = np.frombuffer(said, np.uint8)

    def result(self) -> LookupResult:
        """Return what is known now: the exact hit, once all steps were taken."""
        hit = self._proven() if self._hit is None else self._hit
        loads = plan_load(self._layout, hit, device_prefix=self._device_prefix)
        return LookupResult(
            hit=hit,
            full_run=self._full_run(),
            loads=loads,
            keys_asked=tuple(known.num_asked(0, known.num_objects) for known in self._known),
            keys_useful=tuple(
                known.num_asked(load.start, load.stop) for known, load in zip(self._known, loads, strict=True)
            ),
            steps=self._num_steps,
            rank_holes=tuple(hole for known in self._known for hole in known.rank_holes()),
        )

    def _search(self) -> Iterator[list[Ask]]:
        for known in self._dense:
            yield from self._find_run(known)
        suspect: _Known | None = None
        while self._bound > self._device_prefix:
            if suspect is not None:
                yield from self._descend(suspect)
            else:
                asks = self._open_needs() or self._open_ranks()
                if not asks:
                    break
                yield asks
            suspect = self._rule_out()
        self._hit = max(self._bound, self._device_prefix)

    def _find_run(self, known: _Known) -> Iterator[list[Ask]]:
        """Lower the bound to where a downward-closed group's run ends, by its sentinels."""
        low, high = known.base, known.need(self._bound)[1]
        while low < high and self._bound > self._device_prefix:
            span = high - low
            points = sorted({*(low + span * i // SENTINELS for i in range(SENTINELS)), high - 1})
            yield [_ask(known, points)]
            states = known.states(0)
            absent = next((i for i, point in enumerate(points) if states[point] == _ABSENT), None)
            if absent is None:
                break
            low = points[absent - 1] + 1 if absent else low
            self._bound = self._below(known, points[absent])
            high = known.need(self._bound)[1]

    def _descend(self, known: _Known) -> Iterator[list[Ask]]:
        """Lower the bound to the next candidate that no sentinel of this group rules out.

        The sentinel of a candidate is the oldest object that it needs: where it is absent, it rules out the
        most further candidates.
        """
        states = known.states(0)
        while True:
            tried: list[tuple[int, int]] = []
            boundary = self._bound
            while boundary > self._device_prefix and len(tried) < PROOFS:
                start, stop = known.need(boundary)
                if start == stop or states[start] != _UNKNOWN:
                    break
                tried.append((boundary, start))
                boundary = self._below(known, start)
            if not tried:
                return
            yield [_ask(known, [sentinel for _, sentinel in reversed(tried)])]
            alive = (candidate for candidate, sentinel in tried if states[sentinel] != _ABSENT)
            self._bound = next(alive, boundary)

    def _open_needs(self) -> list[Ask]:
        """Return what is unknown of the bound's needs: windows and states first, else or if few all."""
        asks = self._unknown(self._sparse)
        rest = self._unknown(self._dense)
        if not asks or sum(len(ask.objects) for ask in (*asks, *rest)) <= FEW:
            asks += rest
        return asks

    def _unknown(self, groups: Sequence[_Known]) -> list[Ask]:
        found = ((known, known.unknown(0, self._bound)) for known in groups)
        return [_ask(known, objects) for known, objects in found if len(objects)]

    def _open_ranks(self) -> list[Ask]:
        """Return what the other ranks have not been asked of the bound's needs."""
        return [
            Ask(spec_group=known.group.index, rank=rank, objects=objects)
            for known in self._known
            for rank in range(1, known.group.num_ranks)
            if len(objects := known.unknown(rank, self._bound))
        ]

    def _rule_out(self) -> _Known | None:
        """Lower the bound below every absent object that it needs.

        Returns:
            The window or state group that did so last, whose sentinels promise the most; ``None`` where a
            downward-closed group did, or none.
        """
        suspect = None
        settled = False
        while not settled and self._bound > self._device_prefix:
            settled = True
            for known in self._known:
                absent = known.first_absent(*known.need(self._bound))
                if absent is not None:
                    settled = False
                    self._bound = self._below(known, absent)
                    suspect = None if known in self._dense else known
        return suspect

    def _below(self, known: _Known, absent: int) -> int:
        """Return the largest candidate that does not need an absent object which a larger one needs."""
        end = absent * known.group.object_size - known.group.margin
        return max(0, end // self._layout.alignment * self._layout.alignment)

    def _proven(self) -> int:
        """Return the best boundary that the answers so far prove legal."""
        present = [known.present() for known in self._known]
        return max(self._device_prefix, longest_hit(self._layout, self._num_tokens, present))

    def _full_run(self) -> int:
        """Return the tokens up to the first object that a downward-closed group is known to lack."""
        runs = []
        for known in self._dense:
            absent = known.first_absent(known.base, known.num_objects)
            runs.append((known.num_objects if absent is None else absent) * known.group.object_size)
        return min(runs, default=0)


def _ask(known: _Known, objects: Sequence[int] | NDArray[np.int64]) -> Ask:
    return Ask(spec_group=known.group.index, rank=0, objects=np.asarray(objects, np.int64))
