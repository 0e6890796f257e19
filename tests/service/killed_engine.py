"""An engine process on a local store that is killed in the middle of a put or a get: run as a script.

killed_engine.py DIR put|get SEED
"""

import os
import random
import signal
import sys
from pathlib import Path

from hybridkv.stores.local.store import LocalStore
from tests.service.test_outputs import Pair, layout_of, prompt_of

MIX = "all kinds"
CAPACITY_BYTES = 8 << 20
NUM_COPIES = 3


def first_prompt(seed: int) -> list[int]:
    return prompt_of(random.Random(seed), 100)


def kill_after(count: int):
    """Return a hook that kills this process at its n-th call."""
    left = count

    def step(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def main() -> None:
    path, when, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    step = kill_after(NUM_COPIES)

    def at_point(point: str) -> None:
        if when == "put" and point == "put: one payload copied":
            step()

    store = LocalStore(path, CAPACITY_BYTES, at_point=at_point)
    if when == "get":
        load = store._load
        store._load = lambda *arguments: (load(*arguments), step())[0]
    pair = Pair(layout_of(MIX), store)
    prompt = first_prompt(seed)
    pair.serve("first", prompt)
    pair.serve("again", prompt)


if __name__ == "__main__":
    main()
