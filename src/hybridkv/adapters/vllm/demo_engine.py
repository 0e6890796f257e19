"""The processes of the demonstration: one makes its model, the others serve it with vLLM."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from hybridkv.errors import HybridKVError

VOCABULARY = 512
WINDOW = 128
NUM_OUTPUT_TOKENS = 16
LAST_WORDS = 20

ENVIRONMENT = {  # read when vLLM is imported
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more make a small model slower
    "TORCHDYNAMO_DISABLE": "1",  # compiling would take longer than all else
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class ChildEndedError(HybridKVError):
    """A process of the demonstration ended; the message holds its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine gave.

    Attributes:
        tokens: of the output.
        cached: tokens of the prompt that were not computed.
        first_token_s: from the request's arrival to the first token of the output.
    """

    tokens: list[int]
    cached: int
    first_token_s: float


class Child:
    """A process that answers what it is asked, until the context ends.

    Args:
        log: file for all that it prints.
        work: called in it with a connection, on which orders come and answers go, and with ``args``.
    """

    def __init__(self, log: Path, work: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_quietly, args=(log, work, theirs, *args))
        self._process.start()
        theirs.close()  # so that its end is noticed

    def ask(self, order: object) -> Any:  # noqa: ANN401 - whatever the work answers
        """Return the answer.

        Raises:
            ChildEndedError: the process ended.
        """
        try:
            self._orders.send(order)
            return self._orders.recv()
        except (EOFError, OSError):
            words = self._log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
            raise ChildEndedError("\n".join(["a process has ended; its last words:", *words])) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._orders.close()
        self._process.join()


# ---- in the child processes


def _quietly(log: Path, work: Callable[..., None], orders: Connection, *args: object) -> None:
    os.environ.update(ENVIRONMENT)
    with log.open("a") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    with suppress(EOFError):  # the other end has closed
        work(orders, *args)
    sys.stdout.flush()


def make_model(orders: Connection, path: Path) -> None:
    """Write a model of two window layers and one of full attention, twice, with random weights."""
    import torch  # noqa: PLC0415 - slow, and wanted in this process only
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: PLC0415

    orders.recv()
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # tied random weights repeat one token
        initializer_range=0.2,
        architectures=["Gemma3ForCausalLM"],
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(path)
    orders.send(None)


def serve(orders: Connection, model: Path, store: str | None) -> None:
    """Answer prompts; with hybridkv where there is a store."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - when the environment is set

    from vllm import LLM  # noqa: PLC0415

    transfer = KVTransferConfig(
        kv_connector="HybridKVConnector",
        kv_connector_module_path="hybridkv.adapters.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": store},
    )
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        kv_cache_memory_bytes=128 << 20,
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=transfer if store else None,
    )
    try:
        while True:
            orders.send(_answer(llm.llm_engine, orders.recv()))
    finally:
        llm.llm_engine.engine_core.shutdown()


def _answer(engine: Any, prompt: list[int]) -> Answer:  # noqa: ANN401 - vLLM's LLMEngine
    from vllm import SamplingParams  # noqa: PLC0415

    greedy = SamplingParams(detokenize=False, temperature=0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS)
    outputs: list[Any] = []
    first_token_s = 0.0
    start = time.perf_counter()
    engine.add_request("turn", {"prompt_token_ids": prompt}, greedy)
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if outputs and not first_token_s:
            first_token_s = time.perf_counter() - start
    # What is left to save needs steps, too: a serving engine goes on stepping, one in this process does not.
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()
    return Answer(
        tokens=list(outputs[-1].outputs[0].token_ids),
        cached=outputs[-1].num_cached_tokens,
        first_token_s=first_token_s,
    )
