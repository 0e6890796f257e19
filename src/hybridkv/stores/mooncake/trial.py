"""A Mooncake cluster on this host for trials and tests: a master and storage nodes as processes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybridkv.errors import ConfigError, StoreUnavailableError
from hybridkv.stores.mooncake import tied
from hybridkv.stores.mooncake.library import load_library
from hybridkv.stores.mooncake.master import Master

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 10.0
CLIENT_TTL_S = 5
"""How long the master believes in a storage node that is gone."""

Process = subprocess.Popen[bytes]


class TrialCluster:
    """A master and its storage nodes on loopback addresses; their memory is lost when they end.

    All processes end with this one, however it ends. Storage nodes listen on all interfaces nevertheless:
    Mooncake has no setting for that.

    Args:
        directory: where the processes write their logs; it exists.
        num_nodes: storage nodes, >= 0.
        segment_bytes: memory of each node.
        port: of the master's RPC; 0: any that is free.
        http_port: of the master's HTTP interface; 0: any that is free.
        lease_s: how long what was looked up or read is not evicted.

    Raises:
        ConfigError: Mooncake is not installed, or a port is taken.
        StoreUnavailableError: a process does not start; the message has its last words.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_nodes: int = 1,
        segment_bytes: int = 4 * 2**30,
        port: int = 0,
        http_port: int = 0,
        lease_s: float = 10.0,
    ) -> None:
        load_library()
        self._directory, self._segment_bytes, self._lease_s = directory, segment_bytes, lease_s
        self._port, self._http_port = _port(port), _port(http_port)
        self.nodes: list[Process] = []
        try:
            self.master = self.start_master()
            for _ in range(num_nodes):
                self.start_node()
        except BaseException:
            self.close()
            raise

    @property
    def uri(self) -> str:
        """Of the store."""
        return f"mooncake://{HOST}:{self._port}?http={self._http_port}"

    def start_master(self) -> Process:
        """Start the master, anew after it was killed, and wait until it answers."""
        binary = shutil.which(
            "mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        )
        if binary is None:
            raise ConfigError(
                "mooncake_master is not beside python or on PATH: pip install 'hybridkv[mooncake]'"
            )
        self.master = self._start(
            "master",
            binary,
            f"--rpc_address={HOST}",
            f"--rpc_port={self._port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={self._http_port}",
            "--enable_metric_reporting=false",
            "--minloglevel=1",
            f"--client_ttl={CLIENT_TTL_S}",
            f"--default_kv_lease_ttl={round(self._lease_s * 1000)}",
        )
        self._wait(self.master, "master", self._master_answers)
        return self.master

    def start_node(self) -> Process:
        """Start one storage node more and wait until the cluster has its memory."""
        name = f"node-{len(self.nodes)}"
        uri = f"{self.uri}&hostname={HOST}&segment={self._segment_bytes}"
        node = self._start(name, sys.executable, "-m", "hybridkv.stores.mooncake.node", uri)
        self.nodes.append(node)
        self._wait(node, name, lambda: b"ready" in self._log(name).read_bytes())
        return node

    def wait(self) -> None:
        """Return when any of the processes has ended."""
        while all(process.poll() is None for process in (self.master, *self.nodes)):
            time.sleep(0.2)

    def close(self) -> None:
        """End all processes."""
        processes = [*self.nodes, *([self.master] if hasattr(self, "master") else [])]
        for process in processes:
            process.send_signal(signal.SIGCONT)  # one that is frozen hears nothing
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, *command: str) -> Process:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own commands
                [sys.executable, tied.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _master_answers(self) -> bool:
        with suppress(OSError, StoreUnavailableError):
            socket.create_connection((HOST, self._port), timeout=1).close()
            Master(f"{HOST}:{self._http_port}").counts()
            return True
        return False

    def _wait(self, process: Process, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                words = self._log(name).read_text(errors="replace").strip().splitlines()[-3:]
                raise StoreUnavailableError(
                    f"Mooncake's {name} does not start: {' '.join(words) or 'no word'}"
                )
            time.sleep(0.05)


def _port(asked: int) -> int:
    """Return the port, or any free one for 0.

    Raises:
        ConfigError: another process listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, asked))
        except OSError as error:
            raise ConfigError(f"port {asked} cannot be used: {error.strerror}") from None
        return int(probe.getsockname()[1])
