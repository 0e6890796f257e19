"""Two engine processes that serve the requests of a trace in turn and share one store."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from hybridkv.errors import StoreUnavailableError
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.report import ReplayReport
from hybridkv.sim.trace import TraceRequest

MakeRequests = Callable[[], Sequence[TraceRequest]]
"""Makes the same requests in each process; a function of a module, or a partial of one."""


class EnginePair:
    """Starts two engine processes, which wait for replays; to be used as a context manager.

    Args:
        make_requests: the trace.
    """

    def __init__(self, make_requests: MakeRequests) -> None:
        context = multiprocessing.get_context("spawn")
        batons = context.Pipe()
        self._pipes, self._processes = [], []
        for turn, baton in enumerate(batons):
            ours, theirs = context.Pipe()
            arguments = (theirs, baton, turn, make_requests)
            self._processes.append(context.Process(target=_engine, args=arguments, daemon=True))
            self._processes[-1].start()
            for end in (theirs, baton):  # so that an engine that dies is noticed
                end.close()
            self._pipes.append(ours)

    def replay(self, settings: ReplaySettings) -> ReplayReport:
        """Replay the requests, each engine every second one, and return the sum of their reports.

        Raises:
            StoreUnavailableError: an engine ended; it has printed why.
        """
        for pipe in self._pipes:
            pipe.send(settings)
        try:
            reports: list[ReplayReport] = [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise StoreUnavailableError("an engine process has ended; its message is above") from None
        reports[0].add(reports[1])
        return reports[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            for pipe, process in zip(self._pipes, self._processes, strict=True):
                pipe.send(None)
                process.join()


def _engine(orders: Connection, baton: Connection, turn: int, make_requests: MakeRequests) -> None:
    """Serve every second request of each replay that is ordered, until there is none."""
    requests = make_requests()
    while (settings := orders.recv()) is not None:
        replay = Replay(settings)
        orders.send(replay.run(_in_turn(replay, requests, baton, turn)))


def _in_turn(
    replay: Replay, requests: Sequence[TraceRequest], baton: Connection, turn: int
) -> Iterator[TraceRequest]:
    """Yield the requests of this engine, each when the other engine has served the one before."""
    for idx, request in enumerate(requests):
        if idx % 2 != turn:
            replay.watch(request)
            continue
        if idx:
            baton.recv()
        yield request
        if idx + 1 < len(requests):
            baton.send(None)
