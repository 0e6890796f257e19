"""What a kind of attention must say about itself: how far back it reads.

Everything that hybridkv decides (which prefix may be resumed, what to save, ask and load) follows from
``CacheSpec.needed``. A kind is one subclass with one rule, ``oldest_needed``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import SpecError

Positions = TypeVar("Positions", int, NDArray[np.int64])
"""One token position or an array of them: rules are plain arithmetic that works on both."""


MAX_SIZE = 1 << 40
"""Largest number that a spec, group or layout accepts: far above any model, and safe in int64 arithmetic."""


def require_int(owner: str, field: str, value: object, at_least: int) -> None:
    """Refuse a field that is no integer in [``at_least``, ``MAX_SIZE``].

    Raises:
        SpecError: naming owner, field and value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SpecError(f"{owner}: {field} is {value!r}; give an integer >= {at_least}")
    if value > MAX_SIZE:
        raise SpecError(f"{owner}: {field} is above {MAX_SIZE}; no model has such sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec(ABC):
    """A kind of attention with its sizes.

    Attributes:
        block_size: tokens per block, >= 1.
    """

    kind: ClassVar[str]
    """Name of the kind in layout files and manifests."""
    downward_closed: ClassVar[bool] = False
    """Whether a legal prefix makes every smaller aligned prefix legal: nothing old is ever dropped."""
    widened_by_lookahead: ClassVar[bool] = True
    """Whether speculative decoding must find ``lookahead`` more tokens in this kind."""
    written_only_at_step_end: ClassVar[bool] = False
    """Whether a block has content only where the engine ended a step exactly at the block's end."""

    block_size: int

    def __post_init__(self) -> None:
        self._require("block_size", at_least=1)

    def _require(self, field: str, *, at_least: int) -> None:
        require_int(self.kind, field, getattr(self, field), at_least)

    @abstractmethod
    def oldest_needed(self, prefix: Positions) -> Positions:
        """Return the oldest position that a request resuming at ``prefix`` >= 1 reads; may be < 0.

        Plain arithmetic that never decreases with ``prefix``, valid for an int and for an int64 array.
        """

    def needed(self, prefix: int, lookahead: int = 0) -> range:
        """Return the token positions that a request resuming at ``prefix`` must find.

        Args:
            prefix: tokens already computed, >= 0; the next query sits at this position.
            lookahead: tokens past the prefix that speculative decoding must also find, >= 0.

        Returns:
            Half-open range of token positions; empty when nothing is needed, as at prefix 0.
        """
        if prefix == 0:
            return range(0)
        return range(max(0, self.oldest_needed(prefix)), prefix + lookahead * self.widened_by_lookahead)

    def needed_bounds(
        self, prefixes: NDArray[np.int64], lookahead: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``start`` and ``stop`` of ``needed`` for many prefixes at once.

        Args:
            prefixes: int64, shape (n,), each >= 1.
            lookahead: as in ``needed``.

        Returns:
            Two int64 arrays of shape (n,).
        """
        return (
            np.maximum(self.oldest_needed(prefixes), 0),
            prefixes + lookahead * self.widened_by_lookahead,
        )
