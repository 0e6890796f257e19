"""hybridkv's service under the reference engine: what an engine adapter does, in its smallest form."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import TransferError
from hybridkv.keys import BlockHasher, KeyScheme, Namespace
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.service.worker import WorkerSide
from hybridkv.stores.base import Store
from hybridkv.testing.reference_engine import BlockTables, Connector, RequestStep
from hybridkv.testing.reference_model import EngineMemory
from hybridkv.transfer.block_io import NumpyBlockIO
from hybridkv.transfer.block_pieces import BlockPiece, HostMemory
from hybridkv.transfer.moves import MoverSettings


class ServiceConnector(Connector):
    """A connector of the reference engine over the scheduler side and one worker side for each rank.

    Args:
        memory: of the engine.
        store: owned by the caller.
        scheduler: settings of the scheduler side.
        mover: settings of the transfers.
    """

    def __init__(
        self,
        memory: EngineMemory,
        store: Store,
        *,
        scheduler: SchedulerSettings | None = None,
        mover: MoverSettings | None = None,
    ) -> None:
        layout = memory.layout
        scheme = KeyScheme(
            Namespace(model_version="reference"), layout, digest_bytes=BlockHasher.digest_bytes
        )
        self._memory, self._hasher = memory, BlockHasher(hash_unit=layout.hash_unit)
        self._driver = LookupDriver(store, scheme, breaker=mover.guard if mover else None)
        self.side = SchedulerSide(self._driver, scheme, scheduler or SchedulerSettings())
        self.workers = [
            WorkerSide(store, layout, NumpyBlockIO(layout, _pieces(memory, rank)), rank=rank, settings=mover)
            for rank in range(layout.tp)
        ]
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    def lookup(self, request_id: str, tokens: tuple[int, ...], device_prefix: int) -> int | None:
        """Look the prompt up at once."""
        blob = self._hasher.hash_tokens(tokens)
        return self.side.find_hit(request_id, len(tokens), blob, device_prefix=device_prefix)

    def allocated(self, request_id: str, hit: int, tables: BlockTables) -> None:  # noqa: ARG002
        """Start the load, holding its blocks."""
        try:
            self._hold(self.side.allocated(request_id, tables))
        except TransferError:
            self._failed.add(request_id)
        self._send()

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Collect what the workers report and give back what they hold no more."""
        for worker in self.workers:
            progress = self.side.report(worker.poll())
            self._loaded |= set(progress.loaded)
            self._failed |= set(progress.load_failed)
            for group, block in progress.released:
                self._memory.unpin(group, block)
        done = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return done

    def start_step(self, steps: Sequence[RequestStep]) -> None:
        """Nothing: loads were started when their blocks were allocated."""

    def end_step(self, steps: Sequence[RequestStep]) -> None:
        """Save what the step completed, holding its blocks until they are staged."""
        for step in steps:
            if self.side.wants_save(step.request_id):
                self._hold(self.side.advanced(step.request_id, step.after, step.tables))
        self._send()

    def preempted(self, request_id: str) -> None:
        """End this life of the request; what its jobs use stays held."""
        self._forget(request_id)

    def finished(self, last: RequestStep) -> None:
        """End the request; what its jobs use stays held."""
        self._forget(last.request_id)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self.workers:
            worker.close()
        self._driver.close()

    def _forget(self, request_id: str) -> None:
        self.side.forget(request_id)
        self._loaded.discard(request_id)
        self._failed.discard(request_id)
        self._send()

    def _hold(self, blocks: frozenset[tuple[int, int]]) -> None:
        for group, block in blocks:
            self._memory.pin(group, block)

    def _send(self) -> None:
        plan = self.side.take_step()
        for worker in self.workers:
            worker.start(plan)


def _pieces(memory: EngineMemory, rank: int) -> list[list[BlockPiece[HostMemory]]]:
    """Return a rank's part of every layer: the heads of its shard, which lie together in each block."""
    pieces: list[list[BlockPiece[HostMemory]]] = []
    for group, arrays in zip(memory.layout.groups, memory.arrays, strict=True):
        num_ranks = group.ranks(memory.layout.tp)
        part = group.layer_block_bytes // num_ranks
        shard = rank * num_ranks // memory.layout.tp
        pieces.append([_piece(array, part, shard) for array in arrays])
    return pieces


def _piece(array: NDArray[np.uint8], part: int, shard: int) -> BlockPiece[HostMemory]:
    memory: HostMemory = array
    return BlockPiece(
        memory=memory,
        block_bytes=part,
        stride_bytes=array.shape[1],
        offset_bytes=shard * part,
        num_blocks=len(array),
    )
