"""Many processes on one directory, some of them killed at a step of a protocol."""

import itertools
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_worker as worker

from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.local.store import LocalStore
from hybridkv.testing.stores import StoreTests

SCRIPT = Path(worker.__file__)


@pytest.fixture(scope="class")
def visited(tmp_path_factory):
    """A directory whose stores two other processes open, ask, check and close all the time."""
    parent = tmp_path_factory.mktemp("visited")
    command = [sys.executable, SCRIPT, parent, "visit"]
    visitors = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    yield parent
    for visitor in visitors:
        visitor.kill()
        error = visitor.communicate()[1]
        assert visitor.returncode == -signal.SIGKILL, error


class TestBesideOtherProcesses(StoreTests):
    object_bytes = worker.SMALL
    names = itertools.count()

    @pytest.fixture(autouse=True)
    def _parent(self, visited):
        self.parent = visited

    def make_store(self, capacity_bytes):
        capacity_bytes = 1000 * worker.SMALL if capacity_bytes is None else capacity_bytes
        return LocalStore(self.parent / str(next(self.names)), capacity_bytes)


def run(path, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, path, *map(str, arguments)], capture_output=True, check=False
    )


def steps_of(path: Path) -> list[str]:
    """Return the names of the scenario's steps, in order; the store changes."""
    steps = []
    worker.scenario(path, steps.append)
    return steps


def first_and_last(steps: list[str]) -> list[int]:
    """Return the positions of the first and the last occurrence of each name."""
    reverse = len(steps) - 1
    return sorted(
        {steps.index(name) for name in steps} | {reverse - steps[::-1].index(name) for name in steps}
    )


def assert_whole(path: Path, survivors: list[str]) -> None:
    store = LocalStore(path)
    client = worker.Client(store)
    report = store.check()
    assert (report.num_errors, report.reserved_objects) == (0, 0)
    assert len(list((path / "hkv-own").iterdir())) == 1
    held = [info.key for info in store.list()]
    assert set(survivors) <= set(held)
    assert client.get(held) == [GetResult.OK] * len(held)
    # No space is lost: as many objects as ever fit.
    keys = [f"after/{idx}/{worker.SMALL}" for idx in range(worker.CAPACITY_BYTES // worker.SMALL)]
    assert client.put(keys) == [PutResult.STORED] * len(keys)
    assert client.get(keys) == [GetResult.OK] * len(keys)
    assert store.check().num_errors == 0
    store.close()


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A full store in which one process died while it copied and one before its put was done."""
    path = tmp_path_factory.mktemp("half-done") / "store"
    keys = worker.prepare(path)
    steps = steps_of(shutil.copytree(path, path.parent / "trial"))
    for name in ("put: one payload copied", "publish: readable"):
        assert run(path, "scenario", steps.index(name)).returncode == -signal.SIGKILL
    return path, keys


def test_a_kill_at_any_step_loses_nothing_tears_nothing_leaks_nothing(half_done, tmp_path):
    template, keys = half_done
    steps = steps_of(shutil.copytree(template, tmp_path / "trial"))
    assert any(step.startswith("settle") for step in steps)
    assert any(step.startswith("chunk") for step in steps)

    def kill_at(step: int) -> None:
        path = shutil.copytree(template, tmp_path / str(step))
        done = run(path, "scenario", step)
        assert done.returncode == -signal.SIGKILL, (steps[step], done.stderr)
        # The scenario takes at most a dozen of the oldest objects and one chunk of four.
        assert_whole(path, keys[24:])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_at, first_and_last(steps)))


def test_a_kill_while_a_store_is_made_leaves_none_or_a_whole_one(tmp_path):
    steps = steps_of(tmp_path / "trial")
    making = [idx for idx, name in enumerate(steps) if name.startswith(("create", "open"))]
    assert len(making) == 5
    for step in making:
        path = tmp_path / str(step)
        assert run(path, "scenario", step).returncode == -signal.SIGKILL
        worker.scenario(path, str)
        assert LocalStore(path).check().num_errors == 0


def test_several_processes_use_one_directory(tmp_path):
    path = tmp_path / "store"
    LocalStore(path, worker.STRESS_CAPACITY_BYTES)
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda seed: run(path, "stress", seed, 2), range(3)))
    for done in runs:
        assert done.returncode == 0, done.stderr
        assert b'"corrupt": 0' in done.stdout.splitlines()[-1]
    assert LocalStore(path).check().num_errors == 0
