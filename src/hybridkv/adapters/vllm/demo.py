"""The demonstration in real engines: ``python -m hybridkv.adapters.vllm.demo``.

Two vLLM engine processes serve the turns of a few chats, first each on its own, then with one directory of
the local store between them.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table

from hybridkv.adapters.vllm.demo_engine import (
    NUM_OUTPUT_TOKENS,
    VOCABULARY,
    WINDOW,
    Answer,
    Child,
    ChildEndedError,
    make_model,
    serve,
)

NUM_CHATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request of a chat: what it is, which engine gets it, its prompt."""

    what: str
    engine: int
    prompt: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One turn of every chat, answered without and with hybridkv."""

    turn: Turn
    without: list[Answer]
    shared: list[Answer]

    @property
    def is_equal(self) -> bool:
        """Whether both gave the same tokens, in every chat."""
        return [one.tokens for one in self.without] == [one.tokens for one in self.shared]


def chat(seed: int) -> list[Turn]:
    """Return the turns of a chat, whose prompts are random tokens and begin with each other."""
    first, second, third = (text(10 * seed + place, length) for place, length in enumerate((2000, 500, 1000)))
    return [
        Turn(what="a long prompt", engine=0, prompt=first),
        Turn(what="its next turn", engine=1, prompt=first + second),
        Turn(what="half, then other", engine=0, prompt=first[:1000] + third),
        Turn(what="the turn after", engine=0, prompt=first + second + third),
    ]


def text(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def run_demo() -> list[DemoRow]:
    """Serve the chats without and with hybridkv; takes about a minute.

    Raises:
        ChildEndedError: an engine process ended.
    """
    fast = "/dev/shm"  # noqa: S108 - tmpfs, where there is one
    chats = [chat(seed) for seed in range(NUM_CHATS)]
    with tempfile.TemporaryDirectory(dir=fast if Path(fast).is_dir() else None) as name:
        directory = Path(name)
        with Child(directory / "log", make_model, directory / "model") as maker:
            maker.ask(None)
        without = _serve(chats, directory, store=None)
        shared = _serve(chats, directory, store=f"local://{directory}/store?capacity=256MiB")
    return [
        DemoRow(turn=turn, without=[one[place] for one in without], shared=[one[place] for one in shared])
        for place, turn in enumerate(chats[0])
    ]


def _serve(chats: Sequence[Sequence[Turn]], directory: Path, *, store: str | None) -> list[list[Answer]]:
    with ExitStack() as running:
        engines = [
            running.enter_context(Child(directory / f"log-{idx}", serve, directory / "model", store))
            for idx in range(2)
        ]
        for engine in engines:
            engine.ask(text(-1, 600))  # the first request of an engine is slower
        return [[engines[turn.engine].ask(turn.prompt) for turn in turns] for turns in chats]


def demo_table(rows: Sequence[DemoRow]) -> RenderableType:
    """Return the rows as a table for a terminal, with what it shows."""
    table = Table("request", "engine")
    for title in ("prompt", "cached", "first token", "equal"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        both = (row.without, row.shared)
        cached = [f"{min(one.cached for one in answers):,}" for answers in both]
        first_ms = [f"{median(one.first_token_s for one in answers) * 1000:,.0f}" for answers in both]
        table.add_row(
            row.turn.what,
            str(row.turn.engine + 1),
            f"{len(row.turn.prompt):,}",
            " / ".join(cached),
            " / ".join(first_ms) + " ms",
            "yes" if row.is_equal else "NO",
        )
    return Group(
        f"Two vLLM engine processes serve {NUM_CHATS} chats, without / with hybridkv. Each has",
        "its own prefix cache; with hybridkv they also share a local store. The model is",
        f"random, two layers with a window of {WINDOW} tokens for each of full attention.",
        table,
        "prompt: tokens; cached: those among them that were not computed",
        "first token: time from the request's arrival, median of the chats",
        f"equal: whether both gave the same {NUM_OUTPUT_TOKENS} greedy tokens in every chat",
    )


def main() -> int:
    """Show the demonstration; return 0 if all outputs are equal, 1 if not, 2 if an engine ended."""
    try:
        with Console(stderr=True).status("starting two engines twice, about a minute ..."):
            rows = run_demo()
    except ChildEndedError as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False)
        return 2
    Console().print(demo_table(rows))
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
