"""Real vLLM engines on one Mooncake store: with the in-tree connector, with hybridkv's, and with none.

Every contender is a vLLM engine on the CPU in a process of its own, with the same tiny model of random
weights. Seeded chats of several turns, with branches, are served one request at a time; the engines take
turns on each request, so that all see the same load of the machine. Before each one but "on device" the
engine's own prefix cache is emptied: every hit comes from the store. A real Mooncake master and one storage
node serve all of them; no contender's keys meet another's.

    python benchmarks/vllm_serving.py [--chats N] [--json FILE] [--page FILE] [--gate]

Exit code 1 when a hit of ours is not as long as what was saved allows, when the in-tree connector finds more,
when a load failed, or when an output differs from that without a connector; times are reported. ``--gate``
checks these with one chat.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from hybridkv.stores.mooncake.trial import HOST, TrialCluster
from serving_engine import BLOCK, CHUNK, ENVIRONMENT, VOCABULARY, Engine, Record, write_model

SEED = 20_260_301
CHATS = 8
MARKER = "<!-- serving -->"
NONE, PEER, PEER_ALL, OURS = "no connector", "in-tree", "in-tree, retention None", "hybridkv"
MODELS = {"hybrid": (NONE, PEER, PEER_ALL, OURS), "full": (NONE, PEER, OURS)}
OF_GATE = (NONE, PEER, OURS)
TITLES = {"hybrid": "Gemma-3-like", "full": "Llama-like"}
ON_DEVICE = "next turn, on device"
KINDS = ("first turn", "next turn", ON_DEVICE, "edited turn", "branch", "again")
SEGMENT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Request:
    """What every contender serves; the prompts of one chat share beginnings, those of two chats do not."""

    chat: int
    kind: str
    prompt: list[int]


def chat(idx: int) -> Iterator[Request]:
    """Yield the requests of one chat: four turns, three that go back, and a first turn of something else.

    A turn's prompt is the one before, an answer of 60 tokens and a question. "edited turn" asks another
    second question after the first answer; "branch" shares half of the third turn's prompt, where no prompt
    ended; "again" is the third turn once more.
    """
    rng = random.Random(f"{SEED} {idx}")

    def text(fewest: int, most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(fewest, most))]

    first = text(1000, 1200)
    second = first + text(60, 60) + text(150, 350)
    third = second + text(60, 60) + text(150, 350)
    yield Request(idx, "first turn", first)
    yield Request(idx, "next turn", second)
    yield Request(idx, "next turn", third)
    yield Request(idx, ON_DEVICE, third + text(60, 60) + text(150, 350))
    yield Request(idx, "edited turn", second[: len(first) + 60] + text(300, 500))
    yield Request(idx, "branch", third[: len(third) // 2] + text(len(third) // 2, len(third) // 2))
    yield Request(idx, "again", third)
    yield Request(idx, "first turn", text(1000, 1200))


def best_hit(prompt: Sequence[int], served: Sequence[Sequence[int]]) -> int:
    """Return how many tokens a store that keeps every block of what was served can give."""
    longest = 0
    for other in served:
        pairs = zip(prompt, other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))
        longest = max(longest, shared)
    return min(longest, len(prompt) - 1) // BLOCK * BLOCK


class Stage:
    """The store and the engines of one model, all running.

    Args:
        kind: of the model.
        directory: for logs and settings.
        cluster: the store.
        names: of the contenders.
    """

    def __init__(self, kind: str, directory: Path, cluster: TrialCluster, names: Sequence[str]) -> None:
        self.kind, self._exit = kind, ExitStack()
        address, self._http_port = re.findall(r":(\d+)\?http=(\d+)$", cluster.uri)[0]
        self._opener = build_opener(ProxyHandler({}))
        model = directory / f"{kind}-model"
        write_model(model, kind, SEED)
        settings = directory / "mooncake.json"
        settings.write_text(json.dumps(_mooncake_settings(f"{HOST}:{address}")))
        os.environ |= {"MOONCAKE_CONFIG_PATH": str(settings), "VLLM_RPC_BASE_PATH": str(directory)}
        self.engines = []
        for port, name in enumerate(names):
            log = directory / f"{kind}-{name}.log"
            engine = Engine(name, log, model=str(model), **_contender(name, cluster.uri, port))
            self._exit.enter_context(closing(engine))
            self.engines.append(engine)
        self.facts = {engine.name: engine.receive() for engine in self.engines}

    def serve(self, request: Request, turn: int) -> Iterator[Record]:
        """Yield what each contender made of a request; they take turns in going first."""
        first = turn % len(self.engines)
        for engine in (*self.engines[first:], *self.engines[:first]):
            before = self._stored_bytes()
            record = engine.serve(request.prompt, forget=request.kind != ON_DEVICE)
            yield {
                "model": self.kind,
                "contender": engine.name,
                "chat": request.chat,
                "kind": request.kind,
                "num_tokens": len(request.prompt),
                "stored_bytes": self._stored_bytes() - before,
                **record,
            }

    def _stored_bytes(self) -> int:
        with self._opener.open(f"http://{HOST}:{self._http_port}/metrics", timeout=10) as answer:
            found = re.search(r"^master_allocated_bytes ([0-9.e+]+)$", answer.read().decode(), re.MULTILINE)
        assert found, "not a Mooncake master of a known version"
        return int(float(found[1]))

    def close(self) -> None:
        """End the engines."""
        self._exit.close()


def _mooncake_settings(address: str) -> dict[str, object]:
    """Return the in-tree connector's file: like hybridkv, it brings no memory of its own into the pool."""
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "64MB",
    }


def _contender(name: str, uri: str, port: int) -> dict[str, Any]:
    """Return the settings of a contender's engine, each connector's own defaults otherwise."""
    if name == NONE:
        return {}
    transfer: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if name == OURS:
        transfer |= {
            "kv_connector": "HybridKVConnector",
            "kv_connector_module_path": "hybridkv.adapters.vllm.connector",
            "kv_connector_extra_config": {"store": uri},
        }
        return {"kv_transfer_config": transfer}
    extra = {"cache_prefix": name, "lookup_rpc_port": port}
    transfer |= {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": extra}
    interval = {"prefix_cache_retention_interval": None} if name == PEER_ALL else {}
    return {"kv_transfer_config": transfer, **interval}


def run(stage: Stage, num_chats: int, *, warm_up: bool) -> tuple[list[Record], list[str]]:
    """Serve all chats; return the records and what is wrong with them."""
    records: list[Record] = []
    wrong: list[str] = []
    turn = 0
    for idx in range(-1 if warm_up else 0, num_chats):
        served: list[list[int]] = []
        for request in chat(idx):
            turn += 1
            round_ = {record["contender"]: record for record in stage.serve(request, turn)}
            wrong += _mistakes(request, best_hit(request.prompt, served), round_)
            served.append(request.prompt)
            if idx >= 0:
                records += round_.values()
        print(f"{TITLES[stage.kind]}: chat {idx + 1} of {num_chats}", flush=True)
    for record in records:
        del record["output"], record["finish_reason"]
    return records, wrong


def _mistakes(request: Request, best: int, by_name: dict[str, Record]) -> Iterator[str]:
    what = f"{request.kind} of chat {request.chat}"
    ours = by_name[OURS]
    if request.kind != ON_DEVICE and ours["external"] != best:
        yield f"{what}: a hit of {ours['external']} tokens, not {best}"
    for name, record in by_name.items():
        if record["lookups"] > 1:
            yield f"{what}: {name} looked up {record['lookups']} times, so a load failed"
        if record["cached"] > ours["cached"] and name != NONE:
            yield f"{what}: {name} has {record['cached']} tokens, hybridkv {ours['cached']}"
        if record["output"] != by_name[NONE]["output"]:
            yield f"{what}: {name} gives another output than the engine without a connector"
        if record["finish_reason"] != "length":
            yield f"{what}: {name} ended with {record['finish_reason']}"


# ---- figures


class Figures:
    """Medians over the records of one model."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def median(self, name: str, kind: str, field: str) -> float:
        """Return a contender's median of a field over the requests of a kind."""
        return statistics.median(record[field] for record in self._of(name, kind))

    def step_ms(self, name: str, num_tokens: int) -> tuple[float, float]:
        """Return a contender's median step in first turns, which nobody has a hit for, and its calls' part.

        Args:
            name: of the contender.
            num_tokens: of the steps that are meant.
        """
        steps = [step for one in self._of(name, "first turn") for step in one["steps"]]
        wholes, parts = zip(*[rest for num, *rest in steps if num == num_tokens], strict=True)
        return statistics.median(wholes), statistics.median(parts)

    def stored(self, name: str) -> float:
        """Return the bytes that a contender stored for a token of first turns."""
        first = self._of(name, "first turn")
        return sum(one["stored_bytes"] for one in first) / sum(one["num_tokens"] for one in first)

    def _of(self, name: str, kind: str) -> list[Record]:
        return [one for one in self._records if (one["contender"], one["kind"]) == (name, kind)]


def summary(kind: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return a model's medians, by kind of request and contender."""
    figures, names = Figures(records), MODELS[kind]
    fields = ("num_tokens", "cached", "external", "ttft_ms", "held_ms", "answer_ms")
    return {
        "requests": {
            what: {
                name: {field: round(figures.median(name, what, field), 3) for field in fields}
                for name in names
            }
            for what in KINDS
        },
        "steps": {
            name: {
                "prefill_ms": round(prefill, 3),
                "prefill_inside_ms": round(prefill_inside, 3),
                "decode_ms": round(decode, 3),
                "decode_inside_ms": round(decode_inside, 3),
            }
            for name in names
            for prefill, prefill_inside in [figures.step_ms(name, CHUNK)]
            for decode, decode_inside in [figures.step_ms(name, 1)]
        },
        "stored_bytes_per_token": {name: round(figures.stored(name)) for name in names if name != NONE},
    }


def table(medians: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the page's tables."""
    yield "Tokens that need not be computed, and time to first token (TTFT):"
    yield ""
    yield (
        "| model | request | prompt | hit, in-tree | in-tree, retention None | hybridkv | TTFT, recompute "
        "| in-tree | in-tree, retention None | hybridkv | faster than recompute | than in-tree |"
    )
    yield "|---" * 12 + "|"
    for kind, found in medians.items():
        for what, by_name in found["requests"].items():
            yield _row(TITLES[kind], what, by_name)
    yield ""
    yield "One lookup: how long it held the scheduler, and until its answer was there (ms):"
    yield ""
    yield "| model | request | held, in-tree | hybridkv | less | answer, in-tree | hybridkv |"
    yield "|---" * 7 + "|"
    for kind, found in medians.items():
        for what, by_name in found["requests"].items():
            peer, ours = by_name[PEER], by_name[OURS]
            yield (
                f"| {TITLES[kind]} | {what} | {peer['held_ms']:.2f} | {ours['held_ms']:.2f} "
                f"| {peer['held_ms'] / ours['held_ms']:.1f}x "
                f"| {peer['answer_ms']:.2f} | {ours['answer_ms']:.2f} |"
            )
    yield ""
    yield "Steps of first turns, where nobody has a hit, and what was stored:"
    yield ""
    yield (
        "| model | contender | step with 512 tokens | to no connector | in the connector "
        "| decode step | to no connector | in the connector | bytes stored a token |"
    )
    yield "|---" * 9 + "|"
    for kind, found in medians.items():
        for name in MODELS[kind]:
            mine, none = found["steps"][name], found["steps"][NONE]
            times = [
                f"{mine[f'{step}_ms']:.1f} ms | {mine[f'{step}_ms'] / none[f'{step}_ms']:.2f}x "
                f"| {mine[f'{step}_inside_ms']:.2f} ms"
                for step in ("prefill", "decode")
            ]
            stored = found["stored_bytes_per_token"].get(name)
            yield f"| {TITLES[kind]} | {name} | {' | '.join(times)} | {f'{stored:,}' if stored else ''} |"


def _row(title: str, what: str, by_name: dict[str, dict[str, float]]) -> str:
    none, peer, ours = by_name[NONE], by_name[PEER], by_name[OURS]
    every = by_name.get(PEER_ALL)
    cells = [
        title,
        what,
        f"{none['num_tokens']:,.0f}",
        f"{peer['cached']:,.0f}",
        f"{every['cached']:,.0f}" if every else "",
        f"{ours['cached']:,.0f}",
        f"{none['ttft_ms']:.0f} ms",
        f"{peer['ttft_ms']:.0f} ms",
        f"{every['ttft_ms']:.0f} ms" if every else "",
        f"{ours['ttft_ms']:.0f} ms",
        f"{none['ttft_ms'] / ours['ttft_ms']:.2f}x",
        f"{peer['ttft_ms'] / ours['ttft_ms']:.2f}x",
    ]
    return f"| {' | '.join(cells)} |"


def _put_into_page(page: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the page's marker and its next heading."""
    before, after = page.read_text().split(MARKER)
    rest = after[after.index("\n## ") :]
    page.write_text("\n".join([before + MARKER, "", *lines, ""]) + rest)


def _settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chats", type=int, default=CHATS, help="per model, beside one to warm up")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--page", type=Path, help="put the tables into this docs page, below its marker")
    parser.add_argument("--gate", action="store_true", help="one chat on the hybrid model, no times")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    settings = _settings()
    os.environ |= ENVIRONMENT
    records: list[Record] = []
    wrong: list[str] = []
    facts: dict[str, Any] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("hybrid",) if settings.gate else MODELS:
            path = Path(directory)
            names = OF_GATE if settings.gate else MODELS[kind]
            with (
                closing(TrialCluster(path, segment_bytes=SEGMENT_BYTES)) as cluster,
                closing(Stage(kind, path, cluster, names)) as stage,
            ):
                facts[kind] = stage.facts[OURS]
                num_chats = 1 if settings.gate else settings.chats
                of_kind, mistakes = run(stage, num_chats, warm_up=not settings.gate)
            records += of_kind
            wrong += mistakes
    if settings.gate:
        for one in records:
            print(f"{one['kind']:22} {one['contender']:24} {one['cached']:5} of {one['num_tokens']:5} cached")
    else:
        medians = {kind: summary(kind, [one for one in records if one["model"] == kind]) for kind in MODELS}
        print("\n".join(table(medians)))
        if settings.json:
            _write(settings.json, {"seed": SEED, "engines": facts, "medians": medians}, records)
        if settings.page:
            _put_into_page(settings.page, list(table(medians)))
    print(f"{time.monotonic() - start:.0f} s")
    for problem in wrong:
        print(f"MISSED: {problem}")
    return 1 if wrong else 0


def _write(path: Path, head: dict[str, Any], records: Sequence[Record]) -> None:
    """Write the figures, one record a line."""
    for record in records:
        record |= {key: round(value, 3) for key, value in record.items() if isinstance(value, float)}
        record["steps"] = [[num, round(ms, 2), round(inside, 3)] for num, ms, inside in record["steps"]]
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "records": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
