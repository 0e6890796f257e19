"""Recurrent layers (Mamba, gated delta nets): the whole past in one state."""

from dataclasses import dataclass
from typing import ClassVar

from hybridkv.specs.base import CacheSpec, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(CacheSpec):
    """A state after exactly p tokens (Mamba, arXiv:2312.00752, section 3), held by the block ending at p.

    Speculative decoding never widens the need, and a block has content only where a step ended.

    Example:
        >>> Recurrent(block_size=16).needed(32, lookahead=16)
        range(31, 32)
    """

    kind: ClassVar[str] = "recurrent"
    widened_by_lookahead: ClassVar[bool] = False
    written_only_at_step_end: ClassVar[bool] = True

    def oldest_needed(self, prefix: Positions) -> Positions:
        """Return the last computed position: its block holds the state."""
        return prefix - 1
