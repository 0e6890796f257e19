"""The layouts that the lookup benchmark compares, as vLLM's cache groups and as hybridkv's."""

from dataclasses import dataclass

from hybridkv.specs.base import CacheSpec
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from vllm_peer import Group, Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout on both sides.

    Attributes:
        name: for the table.
        groups: vLLM's cache groups.
        hash_unit: tokens.
        tp: tensor-parallel ranks.
        object_tokens: hybridkv's objects in full-attention groups; ``None`` = one block. vLLM has one block.
        heads: KV heads of the model.
    """

    name: str
    groups: tuple[Group, ...]
    hash_unit: int
    tp: int = 1
    object_tokens: int | None = None
    heads: int = 8

    @property
    def title(self) -> str:
        """Name with ranks and object size."""
        objects = f", objects of {self.object_tokens}" if self.object_tokens else ""
        return f"{self.name}, TP {self.tp}{objects}"

    def peer(self) -> Peer:
        """Return vLLM's side."""
        return Peer(self.groups, hash_unit=self.hash_unit, tp=self.tp, num_kv_heads=self.heads)

    def layout(self) -> Layout:
        """Return hybridkv's side."""
        groups = tuple(
            CacheGroup(
                name=f"{group.kind}{idx}",
                spec=_spec(group),
                layer_block_bytes=self.heads * self.tp,
                shards={"mla": 1, "swa_mla": 1, "mamba": self.tp}.get(group.kind, self.heads),
                lookahead=group.block_size if group.eagle and group.kind != "mamba" else 0,
            )
            for idx, group in enumerate(self.groups)
        )
        layout = Layout(name=self.name, groups=groups, hash_unit=self.hash_unit, tp=self.tp)
        return layout if self.object_tokens is None else layout.with_object_tokens(self.object_tokens)


def _spec(group: Group) -> CacheSpec:
    match group.kind:
        case "full":
            return Full(block_size=group.block_size)
        case "mla":
            return MLA(block_size=group.block_size)
        case "swa" | "swa_mla":
            return SlidingWindow(block_size=group.block_size, window=group.window)
        case "mamba":
            return Recurrent(block_size=group.block_size)


_FULL = Group(kind="full", block_size=16)
_GPT_OSS = (_FULL, Group(kind="swa", block_size=16, window=128))
_GEMMA3 = (_FULL, Group(kind="swa", block_size=16, window=1024))
_GEMMA3_27B = (_FULL, *(Group(kind="swa", block_size=16, window=1024) for _ in range(6)))
_DEEPSEEK_V4 = (
    Group(kind="mla", block_size=256),
    Group(kind="swa_mla", block_size=64, window=128),
    Group(kind="swa_mla", block_size=64, window=512),
    Group(kind="swa_mla", block_size=4, window=16),
    Group(kind="swa_mla", block_size=8, window=64),
)
_MAMBA = (Group(kind="full", block_size=528), Group(kind="mamba", block_size=528))

ROWS = (
    Row(name="full 16", groups=(_FULL,), hash_unit=16),
    Row(name="full 16", groups=(_FULL,), hash_unit=16, tp=8),
    Row(name="full 16", groups=(_FULL,), hash_unit=16, tp=8, object_tokens=256),
    Row(name="gpt-oss-like", groups=_GPT_OSS, hash_unit=16),
    Row(name="gpt-oss-like", groups=_GPT_OSS, hash_unit=16, tp=8),
    Row(name="gpt-oss-like", groups=_GPT_OSS, hash_unit=16, tp=8, object_tokens=256),
    Row(name="Gemma3-like", groups=_GEMMA3, hash_unit=16),
    Row(name="Gemma3-like", groups=_GEMMA3, hash_unit=16, tp=8, object_tokens=256),
    Row(name="Gemma-3-27b, 7 cache groups", groups=_GEMMA3_27B, hash_unit=16, heads=16),
    Row(name="DeepSeek-V4-like", groups=_DEEPSEEK_V4, hash_unit=4),
    Row(name="full 528 + Mamba 528", groups=_MAMBA, hash_unit=16, tp=8),
)
