"""Lookup with the least work: the exact hit, asking for little more than what will be loaded.

The search never touches a store. It yields steps of independent ``Ask``s; a driver sends them and hands the
answers back with ``learn``; ``result`` tells the hit. What makes few keys enough:

1. Nothing below the device's prefix is asked, and nothing at all when no candidate lies above it.
2. An absent object is a proof: it rules out every candidate whose need holds it. In a downward-closed group
   a few dozen evenly spread *sentinels* find the end of the run; only what will be loaded is asked in full.
3. Windows and states are tried from the top down: all their tails at the bound in one step; after a miss,
   one sentinel (the oldest object of a need) for each candidate that is not ruled out yet, in one group.
4. One rank answers first; the others are asked only about what will be loaded.

::

    0         p0                     hit            bound           top   N
    |---------|======================|--------------|---------------|-----|
      device    asked in full, loaded  one proof a     ruled out by an
                                       candidate       absent sentinel
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan.boundaries import resend_boundary
from hybridkv.plan.load import plan_load
from hybridkv.plan.presence import longest_hit
from hybridkv.specs.group import SpecGroup
from hybridkv.specs.layout import Layout

SENTINELS = 32
"""Objects of a downward-closed group that one step of the search spreads over the open interval."""
FIRST_PROOFS, MORE_PROOFS, MOST_PROOFS = 32, 4, 1024
"""Sentinels of the first step downwards, the factor from step to step, and the most."""
FEW = 64
"""A step of so few keys costs no more than a round trip of its own."""

_ABSENT, _PRESENT, _UNKNOWN, _FIRST_RANK = 0, 1, 2, 3
_FIRST_RANK_SAYS = bytes((_ABSENT, _FIRST_RANK, *range(2, 256)))


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
        hit: tokens to resume from; the device's prefix where the store adds nothing.
        exact: whether the search ended by itself; else ``hit`` is the best boundary proven so far.
        full_run: leading tokens that every downward-closed group seems to hold, by its sentinels: the
            junction of a save; 0 without such a group.
        loads: per spec group the objects to load.
        keys_asked: per spec group, all ranks together.
        keys_useful: per spec group, those of them that ``loads`` needs.
        steps: round trips, where each step is sent at once.
        rank_holes: objects to repair.
    """

    hit: int
    exact: bool
    full_run: int
    loads: tuple[range, ...]
    keys_asked: tuple[int, ...]
    keys_useful: tuple[int, ...]
    steps: int
    rank_holes: tuple[RankHole, ...]


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one spec group's objects: a byte each, nothing about those below ``base``."""

    group: SpecGroup
    base: int
    state: bytearray
    asked: list[NDArray[np.int64]] = field(default_factory=list)
    other_ranks: dict[int, bytearray] = field(default_factory=dict)

    def need(self, boundary: int) -> tuple[int, int]:
        """Start and stop of the objects that ``boundary`` needs, lookahead included, above the device."""
        need = self.group.needed_objects(boundary, self.group.lookahead)
        return max(need.start, self.base), max(need.stop, self.base)

    def having(self, state: int, boundary: int) -> NDArray[np.int64]:
        """Return the objects of that state among those that ``boundary`` needs."""
        start, stop = self.need(boundary)
        return np.flatnonzero(np.frombuffer(self.state, np.uint8)[start:stop] == state) + start


class Lookup:
    """One search for the longest legal prefix of a prompt.

    Args:
        layout: of the model.
        num_tokens: N, the prompt's length.
        device_prefix: p0, tokens that the device holds in every group, >= 0.

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
        self._layout, self._num_tokens, self._device_prefix = layout, num_tokens, device_prefix
        self._known = [
            _Known(
                group,
                device_prefix // group.object_size,
                bytearray((_UNKNOWN,)) * (num_tokens // group.object_size),
            )
            for group in layout.spec_groups
        ]
        self._dense = [known for known in self._known if known.group.spec.downward_closed]
        self._sparse = [known for known in self._known if not known.group.spec.downward_closed]
        self._full_run = num_tokens if self._dense else 0
        self._holes: list[RankHole] = []
        self._num_steps = 0
        self._num_proofs = FIRST_PROOFS
        self._bound = resend_boundary(layout, num_tokens)
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
        """
        known = self._known[ask.spec_group]
        known.asked.append(ask.objects)
        if ask.rank:
            seen = known.other_ranks.setdefault(ask.rank, bytearray((_UNKNOWN,)) * len(known.state))
            _write(seen, ask.objects, bytes(answers))
        else:
            said = bytes(answers)
            _write(
                known.state,
                ask.objects,
                said if known.group.num_ranks == 1 else said.translate(_FIRST_RANK_SAYS),
            )

    def result(self) -> LookupResult:
        """Return what is known now: the hit, once all steps were taken."""
        self._settle_ranks()
        hit = self._proven() if self._hit is None else self._hit
        loads = plan_load(self._layout, hit, device_prefix=self._device_prefix)
        asked = [np.concatenate(known.asked or [np.zeros(0, np.int64)]) for known in self._known]
        return LookupResult(
            hit=hit,
            exact=self._hit is not None,
            full_run=self._full_run,
            loads=loads,
            keys_asked=tuple(len(objects) for objects in asked),
            keys_useful=tuple(
                int(np.count_nonzero((objects >= load.start) & (objects < load.stop)))
                for objects, load in zip(asked, loads, strict=True)
            ),
            steps=self._num_steps,
            rank_holes=tuple(self._holes),
        )

    def _search(self) -> Iterator[list[Ask]]:
        for known in self._dense:
            if self._bound > self._device_prefix:
                yield from self._find_run(known)
        suspect: _Known | None = None
        while self._bound > self._device_prefix:
            if suspect is not None:
                yield from self._descend(suspect)
                suspect = self._rule_out()
                continue
            asks = self._open_needs() or self._open_ranks()
            if not asks:
                break
            yield asks
            self._settle_ranks()
            suspect = self._rule_out()
        self._hit = max(self._bound, self._device_prefix)

    def _find_run(self, known: _Known) -> Iterator[list[Ask]]:
        """Lower the bound to where a downward-closed group's run ends, by its sentinels."""
        low, high = known.base, known.need(self._bound)[1]
        while low < high:
            span = high - low
            points = sorted({*(low + span * i // SENTINELS for i in range(SENTINELS)), high - 1})
            yield [_ask(known, points)]
            absent = next((i for i, point in enumerate(points) if known.state[point] == _ABSENT), None)
            if absent is None:
                break
            high = points[absent]
            low = points[absent - 1] + 1 if absent else low
            self._bound = self._below(known, high)
        self._full_run = min(self._full_run, high * known.group.object_size)

    def _descend(self, known: _Known) -> Iterator[list[Ask]]:
        """Lower the bound to the next candidate that one sentinel of this group does not rule out."""
        while self._bound > self._device_prefix:
            tried: list[tuple[int, int]] = []
            boundary = self._bound
            while boundary > self._device_prefix and len(tried) < self._num_proofs:
                start, stop = known.need(boundary)
                if start == stop or known.state[start] != _UNKNOWN:
                    break
                tried.append((boundary, start))
                boundary = self._below(known, start)
            if not tried:
                return
            yield [_ask(known, [sentinel for _, sentinel in reversed(tried)])]
            self._num_proofs = min(self._num_proofs * MORE_PROOFS, MOST_PROOFS)
            alive = (at for at, sentinel in tried if known.state[sentinel] != _ABSENT)
            survivor = next(alive, None)
            self._bound = boundary if survivor is None else survivor
            if survivor is not None:
                return

    def _open_needs(self) -> list[Ask]:
        """Return what is unknown of the bound's needs: windows and states first, else or if few all."""
        asks = self._unknown(self._sparse)
        rest = self._unknown(self._dense)
        if not asks or sum(len(ask.objects) for ask in (*asks, *rest)) <= FEW:
            asks += rest
        return asks

    def _unknown(self, groups: Sequence[_Known]) -> list[Ask]:
        found = ((known, known.having(_UNKNOWN, self._bound)) for known in groups)
        return [_ask(known, objects) for known, objects in found if len(objects)]

    def _open_ranks(self) -> list[Ask]:
        """Return what the other ranks have not been asked of the bound's needs."""
        return [
            Ask(spec_group=known.group.index, rank=rank, objects=objects)
            for known in self._known
            if len(objects := known.having(_FIRST_RANK, self._bound))
            for rank in range(1, known.group.num_ranks)
        ]

    def _settle_ranks(self) -> None:
        """Turn what every rank has answered into present, or into absent with a hole to report."""
        for known in self._known:
            if not known.other_ranks:
                continue
            state = np.frombuffer(known.state, np.uint8)
            half = state == _FIRST_RANK
            everywhere = half & (len(known.other_ranks) == known.group.num_ranks - 1)
            for rank, answers in known.other_ranks.items():
                seen = np.frombuffer(answers, np.uint8)
                everywhere &= seen == _PRESENT
                for idx in np.flatnonzero(half & (seen == _ABSENT)).tolist():
                    self._holes.append(RankHole(spec_group=known.group.index, rank=rank, object_idx=idx))
                    state[idx] = _ABSENT
            state[everywhere] = _PRESENT

    def _rule_out(self) -> _Known | None:
        """Lower the bound below every absent object it needs; return the last sparse group that did so."""
        suspect = None
        settled = False
        while not settled and self._bound > self._device_prefix:
            settled = True
            for known in self._known:
                absent = known.state.find(_ABSENT, *known.need(self._bound))
                if absent >= 0:
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
        present = []
        for known in self._known:
            held = np.frombuffer(known.state, np.uint8) == _PRESENT
            held[: known.base] = True
            present.append(held)
        return max(self._device_prefix, longest_hit(self._layout, self._num_tokens, present))


def _ask(known: _Known, objects: Sequence[int] | NDArray[np.int64]) -> Ask:
    return Ask(spec_group=known.group.index, rank=0, objects=np.asarray(objects, np.int64))


def _write(states: bytearray, objects: NDArray[np.int64], values: bytes) -> None:
    first, last = int(objects[0]), int(objects[-1])
    if last - first + 1 == len(values):
        states[first : last + 1] = values
    else:
        np.frombuffer(states, np.uint8)[objects] = np.frombuffer(values, np.uint8)
