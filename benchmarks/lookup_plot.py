"""Draws keys and time over prompt length for the docs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "hybridkv"
from matplotlib import pyplot as plt


class Point(Protocol):
    """The figures of a cell that are drawn."""

    row: str
    num_tokens: int
    contents: str
    keys: int
    peer_keys: int
    ms: float
    peer_ms: float


def plot(cells: Sequence[Point], path: Path) -> None:
    """Write one column a layout: keys above, milliseconds below, both axes logarithmic."""
    rows = sorted({cell.row for cell in cells})
    figure, axes = plt.subplots(2, len(rows), figsize=(10, 7), sharex=True, squeeze=False)
    for column, row in enumerate(rows):
        for colour, contents in enumerate(dict.fromkeys(cell.contents for cell in cells)):
            points = [cell for cell in cells if cell.row == row and cell.contents == contents]
            lengths = [cell.num_tokens for cell in points]
            for axis, ours, peers in (
                (axes[0][column], [c.keys for c in points], [c.peer_keys for c in points]),
                (axes[1][column], [c.ms for c in points], [c.peer_ms for c in points]),
            ):
                axis.loglog(
                    lengths, ours, color=f"C{colour}", marker="o", ms=3, label=f"hybridkv, {contents}"
                )
                axis.loglog(lengths, peers, color=f"C{colour}", ls=":", label=f"vLLM 0.32, {contents}")
        axes[0][column].set_title(row)
        axes[1][column].set_xlabel("prompt, tokens")
        axes[0][column].set_ylabel("keys asked")
        axes[1][column].set_ylabel("lookup, ms (Mooncake master on loopback)")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
