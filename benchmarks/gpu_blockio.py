"""Gather and scatter of blocks on a CUDA device, as shares of a plain pinned copy of the same bytes.

    python benchmarks/gpu_blockio.py [--mib 256] [--repeats 7] [--json FILE]

First the bytes: copies started behind a busy compute stream must see what that stream writes and must not
disturb what it still reads. Then the time: for each number of pieces and size of a block in one of them, the
medians of gather and copy to the host, and of copy from the host and scatter, taking turns with a plain copy
between one device buffer and the same pinned memory. Only the shares mean something on another machine.

This script has not been run on a device yet. Without one it exits with code 2; code 1: bytes differ.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.device.torch_block_io import TorchBlockIO, pinned_bytes
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.transfer.block_io import BlockPiece

BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
PIECES = (1, 16, 96)
MIB = 1 << 20
SLEEP_CYCLES = 200_000_000
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of blocks.

    Attributes:
        block_bytes: of a block in one piece.
        pieces: of each block.
        objects: moved at once.
        plain_out_gb_s: device buffer to pinned memory.
        plain_in_gb_s: pinned memory to device buffer.
        gather_share: gather and copy, as a share of ``plain_out_gb_s``.
        scatter_share: copy and scatter, as a share of ``plain_in_gb_s``.
        gather_start_us: until ``start_gather`` returns.
        scatter_start_us: until ``start_scatter`` returns.
    """

    block_bytes: int
    pieces: int
    objects: int
    plain_out_gb_s: float
    plain_in_gb_s: float
    gather_share: float
    scatter_share: float
    gather_start_us: float
    scatter_start_us: float


class Bench:
    """Blocks of one size in pieces that lie apart, twice as many as are moved, and ids in random order."""

    def __init__(self, block_bytes: int, pieces: int, objects: int) -> None:
        self.object_bytes = block_bytes * pieces
        num_blocks = 2 * objects + 1
        self.memories = [
            torch.randint(0, 256, (num_blocks * block_bytes,), dtype=torch.uint8, device="cuda")
            for _ in range(pieces)
        ]
        shape = {"block_bytes": block_bytes, "stride_bytes": block_bytes, "offset_bytes": 0}
        layout = Layout(
            name="bench",
            groups=(CacheGroup(name="full", spec=Full(block_size=16), layer_block_bytes=self.object_bytes),),
        )
        self.io = TorchBlockIO(
            layout,
            [[BlockPiece(memory=memory, num_blocks=num_blocks, **shape) for memory in self.memories]],
        )
        chosen = np.random.default_rng(SEED).permutation(np.arange(1, num_blocks, dtype=np.int64))[:objects]
        self.ids = chosen.reshape(objects, 1, 1)
        self.host = pinned_bytes(objects * self.object_bytes)
        self.plain = torch.empty(self.host.nbytes, dtype=torch.uint8, device="cuda")

    def expected(self) -> NDArray[np.uint8]:
        """Return the payloads by plain indexing on the host."""
        ids = self.ids.ravel()
        rows = [memory.cpu().numpy().reshape(-1, self.block_bytes)[ids] for memory in self.memories]
        return np.concatenate(rows, axis=1).ravel()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one piece."""
        return self.object_bytes // len(self.memories)

    def copy_out(self) -> None:
        """Copy as many bytes from one device buffer."""
        torch.from_numpy(self.host).copy_(self.plain, non_blocking=True)
        torch.cuda.synchronize()

    def copy_in(self) -> None:
        """Copy as many bytes into one device buffer."""
        self.plain.copy_(torch.from_numpy(self.host), non_blocking=True)
        torch.cuda.synchronize()


def wrong_bytes(bench: Bench) -> Iterator[str]:
    """Yield what goes wrong when copies are started behind a busy compute stream."""
    bench.io.gather(0, bench.ids, bench.host)
    if not np.array_equal(bench.host, bench.expected()):
        yield "gather: bytes differ on an idle stream"
    bench.io.scatter(0, bench.ids, bench.host)
    bench.memories[0].add_(0).clone()  # loads these kernels, which may wait for the device
    torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - torch's own tests have no other way
    for number, memory in enumerate(bench.memories):
        memory.add_(number + 1)
    out = bench.io.start_gather(0, bench.ids, bench.host)
    if out.done():
        yield "gather: ended before the compute stream wrote the blocks"
    out.wait()
    if not np.array_equal(bench.host, bench.expected()):
        yield "gather: bytes differ behind a busy stream"
    before = bench.expected()
    bench.host[:] = np.random.default_rng(SEED).integers(0, 256, bench.host.nbytes, dtype=np.uint8)
    torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001
    read = [memory.clone() for memory in bench.memories]
    back = bench.io.start_scatter(0, bench.ids, bench.host)
    if back.done():
        yield "scatter: ended before the compute stream read the blocks"
    back.wait()
    if not np.array_equal(bench.expected(), bench.host):
        yield "scatter: bytes differ behind a busy stream"
    bench.memories = read
    if not np.array_equal(bench.expected(), before):
        yield "scatter: the compute stream read blocks that were written too early"


def medians_s(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median seconds of each call; the calls take turns, the first turn is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


def measured(block_bytes: int, pieces: int, total_bytes: int, repeats: int) -> Row:
    """Return the figures of one size."""
    bench = Bench(block_bytes, pieces, max(1, total_bytes // (block_bytes * pieces)))
    plain_out_s, gather_s, plain_in_s, scatter_s, gather_start_s, scatter_start_s = medians_s(
        (
            bench.copy_out,
            lambda: bench.io.gather(0, bench.ids, bench.host),
            bench.copy_in,
            lambda: bench.io.scatter(0, bench.ids, bench.host),
            lambda: bench.io.start_gather(0, bench.ids, bench.host),
            lambda: bench.io.start_scatter(0, bench.ids, bench.host),
        ),
        repeats,
    )
    return Row(
        block_bytes=block_bytes,
        pieces=pieces,
        objects=len(bench.ids),
        plain_out_gb_s=bench.host.nbytes / plain_out_s / 1e9,
        plain_in_gb_s=bench.host.nbytes / plain_in_s / 1e9,
        gather_share=plain_out_s / gather_s,
        scatter_share=plain_in_s / scatter_s,
        gather_start_us=gather_start_s * 1e6,
        scatter_start_us=scatter_start_s * 1e6,
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| block in a piece | pieces | objects | plain out, in GB/s | gather | scatter | start, us |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.block_bytes >> 10} KiB | {row.pieces} | {row.objects} "
            f"| {row.plain_out_gb_s:.1f}, {row.plain_in_gb_s:.1f} "
            f"| {row.gather_share:.0%} | {row.scatter_share:.0%} "
            f"| {row.gather_start_us:.0f}, {row.scatter_start_us:.0f} |"
        )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="bytes moved at once")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        return 2
    torch.manual_seed(SEED)
    faults = [fault for size in (4 << 10, 100) for fault in wrong_bytes(Bench(size, 5, 64))]
    print("\n".join(faults) or "bytes: equal, idle and behind a busy compute stream")
    rows = [
        measured(block_bytes, pieces, settings.mib * MIB, settings.repeats)
        for block_bytes in BLOCK_BYTES
        for pieces in PIECES
    ]
    print("\n".join(table(rows)))
    if settings.json:
        found = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "mib": settings.mib,
            "faults": faults,
            "rows": [asdict(row) for row in rows],
        }
        settings.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
