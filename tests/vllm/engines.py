"""Engines in processes of their own, and the outputs that they give."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path

import pytest

from hybridkv.keys import spec_group_of
from hybridkv.stores.base import PutResult
from hybridkv.stores.registry import open_store

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more make a tiny model slower
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the tests
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
TOLERANCE = 1e-4
"""Of log probabilities: a hit changes the shapes of the steps, and with them the order of sums."""


PATIENT = {"lookup_timeout_s": 60, "store_timeout_s": 60}
"""On a busy machine a lookup that is late would be a miss, and a late load would be computed."""


class EngineProcess:
    """A process that serves one engine after the other.

    Args:
        log: where what it prints goes.
        environment: beside ``ENVIRONMENT``.
    """

    def __init__(self, log, **environment):
        mine, theirs = Pipe()
        self.log = log
        self._connection = mine
        # First on the path is what this process tests, whatever is installed.
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.pop("PYTHONPATH", "")])
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_process", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its children end with it, see `close`
            )
        theirs.close()

    def send(self, name, *args, **kwargs):
        """Begin a command."""
        self._connection.send((name, args, kwargs))

    def receive(self, timeout_s=300):
        """Return what the command gives.

        Raises:
            EOFError: the process has ended.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer of the engine; its last words: {self.last_words()}")
        is_ok, answer = self._connection.recv()
        if not is_ok:
            raise AssertionError(f"{answer}\n{self.last_words()}")
        return answer

    def do(self, name, *args, **kwargs):
        """Return what a command gives."""
        self.send(name, *args, **kwargs)
        return self.receive()

    def start(self, model, store=None, *, extra=None, **settings):
        """Start an engine, with hybridkv where a store's URI is given."""
        if store is not None:
            settings["kv_transfer"] = {
                "kv_connector": "HybridKVConnector",
                "kv_connector_module_path": "hybridkv.adapters.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"store": store, **PATIENT, **(extra or {})},
            }
        self.do("start", model=str(model), **{**ENGINE, **settings})

    def outputs(self, name):
        """Return the outputs that a command gives by name, in the order of the names."""
        found = self.do(name)
        return [Run(**found[name]) for name in sorted(found)]

    def run(self, *prompts, **settings):
        """Serve prompts together."""
        return [Run(**one) for one in self.do("run", prompts, **settings)]

    def run_afresh(self, *prompts, **settings):
        """Serve prompts together, of which the engine itself remembers nothing; wait for their saves."""
        self.do("reset")
        runs = self.run(*prompts, **settings)
        self.do("settle")
        return runs

    def kill(self):
        """End it at once, with all that it started; return how it ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(30)

    def wait(self, timeout_s=60):
        """Return how it ended."""
        return self._process.wait(timeout_s)

    def close(self):
        """End it; an engine that shall end in good order is told so by ``stop`` before."""
        self._connection.close()
        self.kill()

    def last_words(self):
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


@dataclass
class Run:
    """A finished request.

    Attributes:
        tokens: of the output.
        logprobs: per token of the output, those of the likeliest tokens.
        cached: tokens of the prompt that were not computed.
        finish_reason: vLLM's.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]] = field(repr=False)
    cached: int
    finish_reason: str

    def assert_equals(self, other, tolerance=TOLERANCE):
        assert self.tokens == other.tokens
        assert (self.finish_reason, len(self.tokens)) == ("length", len(self.logprobs))
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            common = mine.keys() & theirs.keys()
            assert len(common) >= 4  # of 5: the last place may be a tie
            assert {token: mine[token] for token in common} == pytest.approx(
                {token: theirs[token] for token in common}, abs=tolerance, rel=0
            )

    def differs(self, other):
        """Whether ``assert_equals`` fails."""
        try:
            self.assert_equals(other)
        except AssertionError:
            return True
        return False


# ---- what is stored, seen from this process


def spec_groups(store):
    """The spec groups of which something is stored."""
    return {spec_group_of(info.key) for info in store.list()}


def clear(store):
    """Discard all that is stored."""
    store.discard([info.key for info in store.list()])
    assert not list(store.list())


def spoil(store, spec_group):
    """Replace all objects of a spec group by zeros; return how many."""
    infos = [info for info in store.list() if spec_group_of(info.key) == spec_group]
    keys = [info.key for info in infos]
    zeros = bytearray(max(info.num_bytes for info in infos))
    region = store.register(zeros)
    store.discard(keys)
    results = store.put(keys, [[(region.address, info.num_bytes)] for info in infos])
    store.unregister(region)
    assert set(results) == {PutResult.STORED}
    return len(keys)


__all__ = ["TOLERANCE", "EngineProcess", "Run", "clear", "open_store", "spec_groups", "spoil"]
