"""The serving benchmark's gate: hits and outputs of real engines that share a Mooncake store."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_engines_on_one_store_hit_what_was_saved_and_answer_alike():
    done = subprocess.run(
        [sys.executable, "benchmarks/vllm_serving.py", "--gate"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    (branch,) = [
        line.split()
        for line in done.stdout.splitlines()
        if line.startswith("branch  ") and "hybridkv" in line
    ]
    assert int(branch[2]) >= 800
