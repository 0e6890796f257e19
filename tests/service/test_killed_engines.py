"""Engines that share a local store: one is killed while it puts or gets, the other goes on, outputs right."""

import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hybridkv.stores.local.store import LocalStore
from tests.service import killed_engine
from tests.service.killed_engine import CAPACITY_BYTES, MIX, first_prompt
from tests.service.test_outputs import Pair, layout_of, prompt_of

ROOT = Path(__file__).parents[2]


def run_until_killed(path, when, seed):
    command = [sys.executable, "-m", killed_engine.__name__, path, when, str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("is_killed_before", [True, False])
@pytest.mark.parametrize("when", ["put", "get"])
def test_outputs_stay_right_when_another_engine_is_killed_in_the_middle_of_a(
    when, is_killed_before, tmp_path
):
    """Either the surviving engine comes when the other is dead, or it is at work on the store meanwhile."""
    path, rng = tmp_path / "store", random.Random(5)
    if is_killed_before:
        run_until_killed(path, when, seed=1)
    store = LocalStore(path, CAPACITY_BYTES)
    pair = Pair(layout_of(MIX), store)
    warm = prompt_of(rng, 100)
    pair.serve("warm", warm)
    if not is_killed_before:
        run_until_killed(path, when, seed=1)
    # What the dead engine had saved serves this one; where it died in its first put there is nothing yet.
    first = first_prompt(1)
    hit = pair.serve("first", first)
    assert (hit > 0) == (when == "get")
    assert pair.serve("again", first) > 0
    assert pair.serve("longer", warm + prompt_of(rng, 20)) > 0
    pair.close()
    store.close()
    with closing(LocalStore(path)) as reopened:
        report = reopened.check()
        assert report.objects > 0
        assert (report.num_errors, report.reserved_objects) == (0, 0)
