"""Sliding-window attention: every position reads itself and the ``window - 1`` before it."""

from dataclasses import dataclass
from typing import ClassVar

from hybridkv.specs.base import CacheSpec, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(CacheSpec):
    """Causal attention over the last ``window`` positions (Mistral 7B, arXiv:2310.06825, section 2).

    The query at position p attends to [p - window + 1, p]. A window of 1 needs nothing from the cache.

    Attributes:
        window: tokens that a query reads, itself included, >= 1.
        extra: further tokens below the window that an engine prefills again (multi-module MTP), >= 0.

    Example:
        >>> SlidingWindow(block_size=16, window=4).needed(10)
        range(7, 10)
        >>> SlidingWindow(block_size=16, window=1).needed(10)
        range(10, 10)
    """

    kind: ClassVar[str] = "sliding_window"

    window: int
    extra: int = 0

    def __post_init__(self) -> None:
        CacheSpec.__post_init__(self)
        self._require("window", at_least=1)
        self._require("extra", at_least=0)

    def oldest_needed(self, prefix: Positions) -> Positions:
        """Return the first position inside the window of the query at ``prefix``, less ``extra``."""
        return prefix - (self.window + self.extra) + 1
