"""``hybridkv mooncake``: a Mooncake cluster on this host, for trials and tests."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import typer

from hybridkv.cli_output import JsonFile, show, write_json
from hybridkv.errors import ConfigError
from hybridkv.stores.mooncake.settings import MIN_SEGMENT_BYTES
from hybridkv.stores.mooncake.trial import START_S, STOP_S, TrialCluster
from hybridkv.units import parse_bytes

PROBE_S = 0.5
"""Those who ask whether a cluster runs hold its lock for a moment."""

mooncake_app = typer.Typer(no_args_is_help=True, help="A Mooncake cluster on this host, for trials.")

Directory = Annotated[
    Path | None,
    typer.Option(help="Where the cluster's logs and its URI lie; default: one of this user's."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a running cluster tells of itself."""

    uri: str
    nodes: int
    segment_bytes: int
    pid: int
    logs: str


class Place:
    """A cluster's directory; whoever runs the cluster holds its lock.

    Args:
        path: of the directory; created, for this user alone, where it does not exist.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path(tempfile.gettempdir()) / f"hybridkv-mooncake-{os.getuid()}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise ConfigError(f"{self.path} is another user's; give one with --directory")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be used: {error.strerror}") from None
        self._state = self.path / "cluster.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one who runs the cluster.

        Raises:
            ConfigError: another process is.
        """
        with self._lock_file() as lock:
            if not _try_lock(lock, PROBE_S):
                raise ConfigError(
                    f"a cluster runs already in {self.path}; `hybridkv mooncake down` ends it, "
                    "--directory gives this one a place of its own"
                )
            self._state.unlink(missing_ok=True)  # of one that was killed
            try:
                yield
            finally:
                self._state.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Tell whether a cluster runs."""
        with self._lock_file() as lock:
            return not _try_lock(lock)

    def write(self, running: Running) -> None:
        """Tell where the cluster is."""
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps(asdict(running)), encoding="utf-8")
        new.rename(self._state)

    def read(self) -> Running | None:
        """Return what the running cluster tells, if there is one that tells anything."""
        if not self.is_held():
            return None
        with suppress(OSError, ValueError, TypeError):
            return Running(**json.loads(self._state.read_text(encoding="utf-8")))
        return None

    def _lock_file(self) -> IO[str]:
        return (self.path / "lock").open("a", encoding="utf-8")


def _try_lock(file: IO[str], wait_s: float = 0.0) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.01)
        else:
            return True


@mooncake_app.command("up")
def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Storage nodes.")] = 1,
    segment: Annotated[str, typer.Option(help="Memory of each node.")] = "4GiB",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the master; 0: any free one.")] = 0,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the master's HTTP interface; 0: any free one.")
    ] = 0,
    directory: Directory = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it runs; `down` ends it.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Start a master and storage nodes on loopback addresses, print the store's URI, run until Ctrl-C."""
    segment_bytes = parse_bytes(segment)
    if segment_bytes < MIN_SEGMENT_BYTES:
        raise ConfigError(f"--segment {segment}: a segment is at least 16MiB")
    place = Place(directory)
    if detach:
        _tell(_start_detached(place, nodes, segment, port, http_port), json_file)
        return
    with place.held():
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            cluster = TrialCluster(
                place.path, num_nodes=nodes, segment_bytes=segment_bytes, port=port, http_port=http_port
            )
        except KeyboardInterrupt:
            return
        running = Running(
            uri=cluster.uri,
            nodes=nodes,
            segment_bytes=segment_bytes,
            pid=os.getpid(),
            logs=str(place.path),
        )
        try:
            place.write(running)
            _tell(running, json_file)
            cluster.wait()
        except KeyboardInterrupt:
            return
        finally:
            cluster.close()
    raise ConfigError(f"a process of the cluster has ended; its log is in {place.path}")


@mooncake_app.command("down")
def down(directory: Directory = None, json_file: JsonFile = None) -> None:
    """End the cluster that `up` started; what it held is lost."""
    place = Place(directory)
    running = place.read()
    if running is None:
        raise ConfigError(f"no cluster runs in {place.path}")
    os.kill(running.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 2 * STOP_S
    while place.is_held():
        if time.monotonic() > deadline_s:
            raise ConfigError(f"the cluster does not end; its process is {running.pid}")
        time.sleep(0.1)
    show(f"ended {running.uri}", json_file)
    write_json(json_file, {"ended": running.uri})


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(running: Running, json_file: Path | None) -> None:
    if str(json_file) != "-":
        typer.echo(running.uri)
        typer.echo(f"{running.nodes} storage nodes; logs in {running.logs}", err=True)
    write_json(json_file, asdict(running))
    sys.stdout.flush()


def _start_detached(place: Place, nodes: int, segment: str, port: int, http_port: int) -> Running:
    """Run ``up`` in a session of its own and return what it tells."""
    if place.is_held():
        with place.held():  # raises
            pass
    command = [sys.executable, "-m", "hybridkv.cli", "mooncake", "up"]
    command += [f"--nodes={nodes}", f"--segment={segment}", f"--port={port}", f"--http-port={http_port}"]
    log = place.path / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, f"--directory={place.path}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + (nodes + 1) * START_S
    while (running := place.read()) is None or running.pid != process.pid:
        if process.poll() is not None or time.monotonic() > deadline_s:
            words = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigError("; ".join(words).removeprefix("hybridkv: ") or "the cluster does not start")
        time.sleep(0.1)
    return running
