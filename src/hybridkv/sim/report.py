"""What a replay found out, as data and as a table."""

from dataclasses import asdict, dataclass, field, fields

from rich.console import Group, RenderableType
from rich.table import Column, Table

from hybridkv.plan.boundaries import Retention
from hybridkv.units import format_bytes


@dataclass(slots=True, kw_only=True)
class GroupReport:
    """Objects and bytes of one spec group, all ranks together."""

    name: str
    kind: str
    saved_objects: int = 0
    saved_bytes: int = 0
    loaded_objects: int = 0
    loaded_bytes: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    refused_objects: int = 0


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """Settings and results of one replay.

    Attributes:
        full_attention_hit_tokens: what a cache of the full-attention groups alone would have hit, unbounded.
        unbounded_hit_tokens: what an unbounded store with retention ``all`` would have hit, with recurrent
            states at every boundary. Both follow from the shared prefixes of the trace.
        states: where recurrent states exist in this replay.
        evicted_known: whether the store tells what it evicts.
    """

    model: str
    store: str
    tp: int
    retention: Retention
    tails: str
    prefill_tokens: int | None
    payload_scale: str
    bytes_verified: bool
    states: str
    evicted_known: bool
    groups: list[GroupReport]
    requests: int = 0
    skipped_lines: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    full_attention_hit_tokens: int = 0
    unbounded_hit_tokens: int = 0
    keys_asked: int = 0
    keys_useful: int = 0
    round_trips: int = 0
    skip_reasons: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were hit, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def stored_bytes(self) -> int:
        """Bytes saved over the whole replay."""
        return sum(group.saved_bytes for group in self.groups)

    def add(self, other: "ReplayReport") -> None:
        """Count what another replay of the same settings did as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for group, more in zip(self.groups, other.groups, strict=True):
            for name in _GROUP_COUNTS:
                setattr(group, name, getattr(group, name) + getattr(more, name))

    def to_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def render(self) -> RenderableType:
        """Return tables for a terminal."""
        rows = Table("what", Column("value", overflow="fold"), show_header=False, box=None, padding=(0, 2))
        for name, value in self._summary():
            rows.add_row(name, value)
        groups = Table("spec group", box=None, padding=(0, 2))
        for title in (
            "saved",
            "saved bytes",
            "loaded",
            "loaded bytes",
            "evicted",
            "evicted bytes",
            "refused",
        ):
            groups.add_column(title, justify="right")
        for group in self.groups:
            evicted = (
                (f"{group.evicted_objects:,}", format_bytes(group.evicted_bytes))
                if self.evicted_known
                else ("unknown", "")
            )
            groups.add_row(
                f"{group.name} ({group.kind})",
                f"{group.saved_objects:,}",
                format_bytes(group.saved_bytes),
                f"{group.loaded_objects:,}",
                format_bytes(group.loaded_bytes),
                *evicted,
                f"{group.refused_objects:,}",
            )
        return Group(rows, "", groups)

    def _asked(self) -> str:
        each = self.keys_asked / self.requests if self.requests else 0.0
        return (
            f"{self.keys_asked:,} in {self.round_trips:,} round trips: {each:,.1f} a request, "
            f"{self.keys_useful:,} of them for objects that were then loaded"
        )

    def _summary(self) -> list[tuple[str, str]]:
        def share(tokens: int) -> str:
            rate = tokens / self.prompt_tokens if self.prompt_tokens else 0.0
            return f"{tokens:,} ({rate:.1%})"

        prefill = (
            "whole prompts" if self.prefill_tokens is None else f"steps of {self.prefill_tokens:,} tokens"
        )
        moved = "every loaded object verified" if self.bytes_verified else "sizes only"
        summary = [
            ("model", f"{self.model}, TP {self.tp}"),
            ("store", self.store),
            ("settings", f"retention {self.retention}, tails {self.tails}, {prefill}; {self.states}"),
            ("payloads", f"{moved}, scale {self.payload_scale}"),
            ("requests", f"{self.requests:,}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("hit tokens", share(self.hit_tokens)),
            ("  limit: full attention alone, unbounded", share(self.full_attention_hit_tokens)),
            ("  limit: retention all, unbounded", share(self.unbounded_hit_tokens)),
            ("keys asked", self._asked()),
        ]
        if self.skipped_lines:
            summary.append(("skipped lines", f"{self.skipped_lines:,}, first: {self.skip_reasons[0]}"))
        return summary


_COUNTS = [item.name for item in fields(ReplayReport) if item.type is int and item.name != "tp"]
_GROUP_COUNTS = [item.name for item in fields(GroupReport) if item.type is int]
