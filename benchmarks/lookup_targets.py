"""What the lookup benchmark has to reach: counts are gates, times are reported beside their target."""

from collections.abc import Iterator
from typing import Protocol


class Measured(Protocol):
    """The figures of a cell that targets speak of."""

    row: str
    num_tokens: int
    contents: str
    store: str
    peer_hit: int
    hit: int
    peer_keys: int
    keys: int
    loaded: int
    proofs: int
    spec_groups: int


_TIMES = {"none": 40.0, "31/32 on device": 10.0}


def target(cell: Measured) -> float | None:
    """Return how many times faster than the peer a lookup at 128K tokens should be; ``None`` = no target."""
    if not 130_000 < cell.num_tokens < 132_000:
        return None
    if cell.contents == "retention 0, fork":
        # Without windows a fork is just a stored half.
        return None if cell.row.startswith("full 16") else 5.0
    if cell.contents == "first half":
        return 15.0 if cell.row.startswith("DeepSeek") else None
    return _all_stored(cell.row) if cell.contents == "all" else _TIMES.get(cell.contents)


def _all_stored(row: str) -> float | None:
    if row.startswith("DeepSeek"):
        return 15
    if row.startswith("Gemma-3-27b"):
        return 8
    if row.startswith(("gpt-oss", "Gemma3")):
        return 15 if "objects of 256" in row else 3 if "TP 1" in row else None
    return 10 if row == "full 16, TP 8, objects of 256" else None


def most_keys(cell: Measured) -> int:
    """Return the most keys that a lookup may ask."""
    match cell.contents:
        case "none":
            return 64 * cell.spec_groups
        case "31/32 on device":
            return cell.peer_keys // 16 if cell.num_tokens > 100_000 else cell.loaded + 64 * cell.spec_groups
        case "first half":
            return cell.loaded + 128 * cell.spec_groups
        case "retention 0, fork":
            return cell.loaded + cell.proofs + 64 * cell.spec_groups
    return cell.loaded + 64 * cell.spec_groups


def missed(cell: Measured) -> Iterator[str]:
    """Yield what a cell misses of hits and counts."""
    where = f"{cell.row}, {cell.num_tokens:,} tokens, {cell.contents}, {cell.store}"
    if cell.keys > most_keys(cell):
        yield f"{where}: {cell.keys} keys asked, at most {most_keys(cell)}"
    step = alignment(cell)
    if cell.hit != cell.peer_hit // step * step:
        yield f"{where}: hit {cell.hit}, the peer's {cell.peer_hit}"


def alignment(cell: Measured) -> int:
    """Return the tokens to which hybridkv's hits are aligned where that is coarser than the peer's."""
    if "objects of 256" in cell.row:
        return 256
    return 528 if "Mamba" in cell.row else 1
