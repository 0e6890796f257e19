"""One vLLM engine in a process of its own, for ``vllm_serving.py``: serves one request after the other.

The engine runs in the process that steps it, as vLLM's own engine process does: scheduler, worker and
connector are together, and a step without a model run is followed by a millisecond of sleep. Lookups, steps
and the connector's calls are timed.
"""

import gc
import inspect
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more make a tiny model slower
    "PYTHONHASHSEED": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
CHUNK = 512
BLOCK = 32
VOCABULARY = 512
ANSWER_S = 120.0
YIELD_S = 0.001
"""What vLLM's engine process sleeps after a step that ran no model."""

Record = dict[str, Any]


class Engine:
    """The near end: a process with one engine.

    Args:
        name: of the contender.
        log: where what the process prints goes.
        settings: of vLLM's ``LLM``; ``kv_transfer_config`` as a dictionary.
    """

    def __init__(self, name: str, log: Path, **settings: object) -> None:
        self.name, self._log = name, log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, str(log), settings))
        self._process.start()
        theirs.close()

    def serve(self, prompt: list[int], *, forget: bool) -> Record:
        """Serve one prompt; see ``_Watched.serve``."""
        self._connection.send((prompt, forget))
        return self.receive()

    def receive(self) -> Record:
        """Return the next answer; the first one tells that the engine has started.

        Raises:
            RuntimeError: the process failed or is silent.
        """
        try:
            is_ok, answer = self._connection.recv() if self._connection.poll(ANSWER_S) else (False, "silent")
        except EOFError:
            is_ok, answer = False, "ended"
        if not is_ok:
            words = self._log.read_text(errors="replace").splitlines()[-20:]
            raise RuntimeError("\n".join([f"{self.name}: {answer}", *words]))
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _obey(connection: Connection, log: str, settings: dict[str, Any]) -> None:
    """Be the far end until the near end closes."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        watched = _Watched(settings)
        connection.send((True, watched.facts()))
        while True:
            prompt, forget = connection.recv()
            connection.send((True, watched.serve(prompt, forget=forget)))
    except EOFError:
        watched.close()
    except BaseException:  # noqa: BLE001 - the near end raises it
        connection.send((False, traceback.format_exc()))


class _Inside:
    """Sums the time that an engine's thread spends in a connector's calls, of either role.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def watch(self, connector: Any) -> None:  # noqa: ANN401
        """Count the time in what an engine calls of a connector."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        for name, found in vars(KVConnectorBase_V1).items():
            if inspect.isfunction(found) and not name.startswith("_"):
                setattr(connector, name, self._counted(getattr(connector, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            start = time.perf_counter()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return counted


class _Watched:
    """An engine whose lookups and steps are timed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from vllm.config import KVTransferConfig

        from vllm import LLM, SamplingParams

        torch.set_num_threads(1)
        transfer = settings.pop("kv_transfer_config", None)
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            enable_prefix_caching=True,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=192 << 20,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **settings,
        )
        self._sampling = SamplingParams(detokenize=False, temperature=0, ignore_eos=True, max_tokens=8)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._num_served = 0
        self._lookups: list[tuple[float, float, int, int | None]] = []
        self._num_scheduled = 0
        self._inside = _Inside()
        self._watch()

    def _watch(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        schedule = self._scheduler.schedule

        def watched_schedule(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            output = schedule(*args, **kwargs)
            self._num_scheduled = output.total_num_scheduled_tokens
            return output

        self._scheduler.schedule = watched_schedule
        connector = self._scheduler.connector
        if connector is None:
            return
        look_up = connector.get_num_new_matched_tokens

        def watched_look_up(request: Any, num_computed: int) -> tuple[int | None, bool]:  # noqa: ANN401
            start = time.perf_counter()
            found = look_up(request, num_computed)
            self._lookups.append((start, time.perf_counter(), num_computed, found[0]))
            return found

        connector.get_num_new_matched_tokens = watched_look_up
        self._inside.watch(connector)
        self._inside.watch(get_kv_transfer_group())

    def facts(self) -> Record:
        config = self._scheduler.kv_cache_config
        return {
            "groups": [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups],
            "num_blocks": config.num_blocks,
            "retention_interval": config.prefix_cache_retention_interval,
        }

    def serve(self, prompt: list[int], *, forget: bool) -> Record:
        """Serve one prompt to its end, then step until nothing is left to do, not even a save.

        Args:
            prompt: token ids.
            forget: whether the engine's own prefix cache is emptied before, so that every hit is external.
        """
        if forget and not self._llm.reset_prefix_cache():
            raise RuntimeError("some block is held though the engine is idle")
        gc.collect()
        self._lookups.clear()
        self._num_served += 1
        steps: list[tuple[int, float, float]] = []
        first_s, output = None, None
        start = time.perf_counter()
        self._engine.add_request(str(self._num_served), {"prompt_token_ids": prompt}, self._sampling)
        while output is None:
            self._inside.seconds = 0.0
            num_tokens, seconds, outputs = self._step()
            if num_tokens:
                steps.append((num_tokens, seconds * 1e3, self._inside.seconds * 1e3))
            for one in outputs:
                first_s = first_s or time.perf_counter() - start
                output = one if one.finished else None
        settled = time.perf_counter()
        while self._scheduler.has_requests():
            self._step()
        (best,) = output.outputs
        return {
            "ttft_ms": first_s * 1e3,
            "settle_ms": (time.perf_counter() - settled) * 1e3,
            "cached": output.num_cached_tokens,
            "output": list(best.token_ids),
            "finish_reason": best.finish_reason,
            "steps": steps,
            **self._looked_up(),
        }

    def _step(self) -> tuple[int, float, list[Any]]:
        self._num_scheduled = 0
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        if not self._num_scheduled and self._scheduler.has_requests():
            time.sleep(YIELD_S)
        return self._num_scheduled, seconds, [one for one in outputs if one.outputs[0].token_ids]

    def _looked_up(self) -> Record:
        if not self._lookups:
            return {"external": 0, "lookups": 0, "held_ms": 0.0, "answer_ms": 0.0}
        answered = [one for one in self._lookups if one[3] is not None]
        return {
            "external": answered[-1][3],
            "lookups": len(answered),
            "held_ms": sum(end - start for start, end, *_ in self._lookups) * 1e3,
            "answer_ms": (answered[0][1] - self._lookups[0][0]) * 1e3,
        }

    def close(self) -> None:
        self._core.shutdown()


def write_model(path: Path, kind: str, seed: int) -> None:
    """Write a model of random weights: ``hybrid``, layers as in Gemma 3, or ``full``, as in Llama."""
    import torch
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,  # tied random weights repeat one token
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if kind == "hybrid":
        config = transformers.Gemma3TextConfig(
            **common,
            architectures=["Gemma3ForCausalLM"],
            query_pre_attn_scalar=32,
            sliding_window=128,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        )
        model = transformers.Gemma3ForCausalLM
    else:
        config = transformers.LlamaConfig(**common, architectures=["LlamaForCausalLM"])
        model = transformers.LlamaForCausalLM
    torch.manual_seed(seed)
    model(config).to(torch.float32).save_pretrained(path)
