"""A real mooncake_master and one storage node on 127.0.0.1, each in its own process, ended by pid.

The node owns the only segment, so its puts are memcpys: keys load several times faster through it than
through a client's loopback TCP. It reads one JSON command a line on stdin and answers one JSON object a line.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
CHUNK = 1000  # keys per put call, below the 1024 transfers in flight that Mooncake survives


def connect(port: int, segment_bytes: int = 0, buffer_bytes: int = 16 << 20) -> Any:  # noqa: ANN401
    """Return a Mooncake client of the master at ``port``; it holds a segment when ``segment_bytes`` > 0."""
    os.environ.update(ENVIRONMENT)  # read when the library is imported and set up
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    address = f"{HOST}:{port}"
    code = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", address)
    if code:
        raise RuntimeError(f"mooncake setup against {address} returned {code}")
    return store


def put_keys(store: Any, keys: Sequence[str], value_bytes: int) -> int:  # noqa: ANN401
    """Put one small value under every key and return how many puts failed."""
    from mooncake.store import ReplicateConfig

    buffer = ctypes.create_string_buffer(b"x" * value_bytes, value_bytes)
    address, config, failed = ctypes.addressof(buffer), ReplicateConfig(), 0
    for i in range(0, len(keys), CHUNK):
        part = list(keys[i : i + CHUNK])
        codes = store.batch_put_from(part, [address] * len(part), [value_bytes] * len(part), config)
        failed += sum(code != 0 for code in codes)
    return failed


@dataclass(frozen=True, slots=True)
class Loopback:
    """A running master and storage node."""

    port: int
    master: subprocess.Popen[bytes]
    node: subprocess.Popen[str]

    def load(self, keys: Iterable[str], value_bytes: int = 16) -> dict[str, Any]:
        """Store a value of ``value_bytes`` under every key; return {keys, failed, seconds}."""
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
            file.write("\n".join(keys))
            file.flush()
            return self._ask({"do": "load", "path": file.name, "value_bytes": value_bytes})

    def clear(self) -> dict[str, Any]:
        """Remove every key, leased or not; return {removed, seconds}."""
        return self._ask({"do": "clear"})

    def memory(self) -> dict[str, int]:
        """Return resident MiB of master and node."""
        return {"master": _resident(self.master.pid), "node": _resident(self.node.pid)}

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.node.stdin
        assert self.node.stdout
        print(json.dumps(command), file=self.node.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.node.stdout.readline())
        return answer


@contextmanager
def loopback(segment_bytes: int = 1 << 30) -> Iterator[Loopback]:
    """Start master and node, yield them, end them by pid."""
    port, metrics = _free_port(), _free_port()
    master = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"--rpc_address={HOST}", f"--rpc_port={port}",
            f"--metrics_host={HOST}", f"--metrics_port={metrics}",
            "--enable_metric_reporting=false", "--minloglevel=2",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    node: subprocess.Popen[str] | None = None
    try:
        _wait_for(port, master)
        node = subprocess.Popen(
            [sys.executable, __file__, str(port), str(segment_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert node.stdout
        if node.stdout.readline() != "ready\n":
            raise RuntimeError("the storage node did not start")
        yield Loopback(port, master, node)
    finally:
        for process in (node, master):
            if process:
                process.terminate()
                process.wait(timeout=15)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        if process.poll() is not None:
            raise RuntimeError(f"mooncake_master ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("mooncake_master did not listen within 5 s")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _serve(port: int, segment_bytes: int) -> None:
    """Be the storage node until stdin closes."""
    store = connect(port, segment_bytes)
    print("ready", flush=True)
    for line in sys.stdin:
        command, start = json.loads(line), time.perf_counter()
        if command["do"] == "load":
            keys = Path(command["path"]).read_text().split("\n")
            answer = {"keys": len(keys), "failed": put_keys(store, keys, command["value_bytes"])}
        else:
            answer = {"removed": store.remove_all(True)}
        print(json.dumps({**answer, "seconds": round(time.perf_counter() - start, 3)}), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
