"""Chunked-local attention: every position reads its own chunk up to itself."""

from dataclasses import dataclass
from typing import ClassVar

from hybridkv.specs.base import CacheSpec, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(CacheSpec):
    """Causal attention inside fixed chunks (Llama 4's local layers, ``attention_chunk_size``).

    The query at position p attends to [p // chunk * chunk, p], so at a chunk boundary nothing is needed.

    Attributes:
        chunk: tokens per chunk, >= 1.

    Example:
        >>> ChunkedLocal(block_size=16, chunk=64).needed(80)
        range(64, 80)
        >>> ChunkedLocal(block_size=16, chunk=64).needed(128)
        range(128, 128)
    """

    kind: ClassVar[str] = "chunked_local"

    chunk: int

    def __post_init__(self) -> None:
        CacheSpec.__post_init__(self)
        self._require("chunk", at_least=1)

    def oldest_needed(self, prefix: Positions) -> Positions:
        """Return the first position of the chunk in which the query at ``prefix`` sits."""
        return prefix // self.chunk * self.chunk
