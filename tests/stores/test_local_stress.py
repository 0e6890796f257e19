"""Writers, readers and evictors in four processes for a minute, killed at random."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_worker as worker

from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.local.store import LocalStore

NUM_PROCESSES = 4
SECONDS = 60
MIN_KILLS = 100


def start(path: Path, seed: int):
    command = [sys.executable, Path(worker.__file__), path, "stress", str(seed), str(SECONDS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill(process) -> dict[str, int]:
    """Kill a worker and return its last counts; whoever ended before had found something wrong."""
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    lines = [line for line in out.split(b"\n")[:-1] if line]
    return json.loads(lines[-1]) if lines else {}


@pytest.mark.slow
def test_a_minute_of_random_kills_leaves_a_whole_store(tmp_path):
    path, chance = tmp_path / "store", random.Random(1)
    watcher = LocalStore(path, worker.STRESS_CAPACITY_BYTES)
    processes = [start(path, seed) for seed in range(NUM_PROCESSES)]
    totals, num_kills = {"stored": 0, "ok": 0, "corrupt": 0}, 0
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.1, 0.5))
        which = chance.randrange(NUM_PROCESSES)
        for name, count in kill(processes[which]).items():
            totals[name] += count
        num_kills += 1
        processes[which] = start(path, num_kills + NUM_PROCESSES)
        assert watcher.stats().used_bytes <= worker.STRESS_CAPACITY_BYTES
    for process in processes:
        kill(process)
    report = watcher.check()
    assert (report.num_errors, report.reserved_objects) == (0, 0)
    assert num_kills >= MIN_KILLS
    assert totals["corrupt"] == 0
    assert min(totals["stored"], totals["ok"]) > 1000
    # The space of all dead reservations is back: the store fills up to the brim with new objects.
    client = worker.Client(watcher)
    num_objects = worker.STRESS_CAPACITY_BYTES // 4096
    for start_idx in range(0, 2 * num_objects, 1024):
        keys = [f"after/{idx}/4096" for idx in range(start_idx, start_idx + 1024)]
        assert client.put(keys) == [PutResult.STORED] * 1024
        assert client.get(keys) == [GetResult.OK] * 1024
    assert watcher.stats().used_bytes == worker.STRESS_CAPACITY_BYTES
