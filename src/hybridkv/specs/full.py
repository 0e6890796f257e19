"""Full attention and multi-head latent attention (MLA): every position reads the whole prefix."""

from dataclasses import dataclass
from typing import ClassVar

from hybridkv.specs.base import CacheSpec, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(CacheSpec):
    """Causal attention over the whole prefix (Vaswani et al. 2017, section 3.2).

    Example:
        >>> Full(block_size=16).needed(32)
        range(0, 32)
        >>> Full(block_size=16).needed(32, lookahead=16)
        range(0, 48)
    """

    kind: ClassVar[str] = "full"
    downward_closed: ClassVar[bool] = True

    def oldest_needed(self, prefix: Positions) -> Positions:
        """Return 0: the first token is read for ever."""
        return prefix * 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA(Full):
    """Attention over compressed latents (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    It reads what full attention reads; its latents are the same on every tensor-parallel rank, which is
    a property of the cache group (``CacheGroup.shards`` = 1).
    """

    kind: ClassVar[str] = "mla"
