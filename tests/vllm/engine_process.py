"""A vLLM engine in a process that does what another process tells it: run as a script with a file descriptor.

Commands are names of methods of ``Served`` with their arguments; ``tests.vllm.engines`` sends them.
"""

import gc
import hashlib
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.request import RequestStatus

from vllm import LLM, SamplingParams

PATIENCE_S = 120


def sampling(max_tokens):
    return SamplingParams(detokenize=False, temperature=0, logprobs=5, ignore_eos=True, max_tokens=max_tokens)


def plain(output):
    """A finished request's output as values that any process can read."""
    (best,) = output.outputs
    return {
        "tokens": list(best.token_ids),
        "logprobs": [{token: found.logprob for token, found in place.items()} for place in best.logprobs],
        "cached": output.num_cached_tokens,
        "finish_reason": best.finish_reason,
    }


class Served:
    """One engine after the other; what looks inside works with an engine in this very process only."""

    def __init__(self):
        self.llm = None

    def start(self, kv_transfer=None, **settings):
        if self.llm is not None:
            self.stop()
        if kv_transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.core = getattr(self.engine.engine_core, "engine_core", None)  # None: in a process of its own
        self.done = {}
        if self.core is not None:
            self.pool = self.core.scheduler.kv_cache_manager.block_pool
            self.free_at_start = self.pool.get_num_free_blocks()

    def stop(self):
        self.engine.engine_core.shutdown()
        self.llm = self.engine = self.core = self.pool = None
        gc.collect()
        cleanup_dist_env_and_memory()

    # ---- whole requests

    def run(self, prompts, max_tokens=16):
        outputs = self.llm.generate(
            [{"prompt_token_ids": one} for one in prompts], sampling(max_tokens), use_tqdm=False
        )
        return [plain(one) for one in outputs]

    def settle(self):
        """Step until nothing is left to do, not even a save; then nobody holds a block."""
        if self.core is None:
            return
        deadline = time.monotonic() + PATIENCE_S
        while self.core.scheduler.has_requests():
            self.engine.step()
            assert time.monotonic() < deadline, "the engine never becomes idle"
        assert self.pool.get_num_free_blocks() == self.free_at_start

    def reset(self):
        """Have the engine forget what it holds itself."""
        self.settle()
        deadline = time.monotonic() + PATIENCE_S
        while not self.llm.reset_prefix_cache():
            assert time.monotonic() < deadline, "some block is held for ever"
            time.sleep(0.05)

    # ---- step by step

    def submit(self, name, prompt, max_tokens=16):
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling(max_tokens))

    def step(self, times=1):
        for _ in range(times):
            self.done |= {one.request_id: plain(one) for one in self.engine.step() if one.finished}

    def step_until_loading(self):
        """Step until some request waits for its load."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._loading():
            assert time.monotonic() < deadline, "no load begins"
            self.step()

    def finish(self):
        """Step until every request has ended; return the outputs by name."""
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished_requests():
            self.step()
            assert time.monotonic() < deadline, "a request never ends"
        done, self.done = self.done, {}
        return done

    def run_watched(self, prompts, max_tokens=16):
        """Serve prompts together; return outputs and what was seen between the steps."""
        preempted, most_pinned, num_held = 0, 0, 0
        scheduler = self.core.scheduler
        preempt = scheduler._preempt_request

        def counting(*args, **kwargs):
            nonlocal preempted
            preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting
        for idx, prompt in enumerate(prompts):
            self.submit(str(idx), prompt, max_tokens)
        while self.engine.has_unfinished_requests():
            self.step()
            pinned = self._pinned_for_saves()
            most_pinned = max(most_pinned, pinned)
            num_held += pinned > 0
        scheduler._preempt_request = preempt
        done = self.finish()
        self.settle()
        return {
            "outputs": [done[str(idx)] for idx in range(len(prompts))],
            "preempted": preempted,
            "most_pinned": most_pinned,
            "steps_with_pins": num_held,
            "num_blocks": self.pool.num_gpu_blocks,
        }

    def _loading(self):
        requests = self.core.scheduler.requests.values()
        return {one.request_id for one in requests if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS}

    def _pinned_for_saves(self):
        """Count blocks that someone beside the running requests and the loads holds."""
        used = {}
        loading, loaded = self._loading(), set()
        for manager in self.core.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for request_id, blocks in manager.req_to_blocks.items():
                ids = [block.block_id for block in blocks if not block.is_null]
                if request_id in loading:
                    loaded.update(ids)
                for block_id in ids:
                    used[block_id] = used.get(block_id, 0) + 1
        return sum(
            block.ref_cnt > used.get(block.block_id, 0)
            for block in self.pool.blocks
            if not block.is_null and block.block_id not in loaded
        )

    # ---- bytes

    def run_and_read(self, prompt):
        """Serve a prompt; return output and digests {layer: {place: digest of the block's bytes}}.

        They are read when the first token is there, of the blocks that the request holds then.
        """
        self.submit("read", prompt)
        scheduler, tables = self.core.scheduler, None
        while tables is None:
            self.step()
            (request,) = scheduler.requests.values()
            if request.num_output_tokens:
                tables = self._bytes_of(scheduler.kv_cache_manager.get_block_ids(request.request_id))
        return {"output": self.finish()["read"], "blocks": tables}

    def _bytes_of(self, tables):
        found = {}
        config = self.core.scheduler.kv_cache_config
        layers = self.core.vllm_config.compilation_config.static_forward_context
        for group, table in zip(config.kv_cache_groups, tables, strict=True):
            for layer in group.layer_names:
                cache = layers[layer].kv_cache
                parts = cache if isinstance(cache, tuple | list) else (cache,)
                found[layer] = {
                    place: self._digest(parts, block, config.num_blocks)
                    for place, block in enumerate(table)
                    if block
                }
        return found

    @staticmethod
    def _digest(parts, block, num_blocks):
        digest = hashlib.sha256()
        for part in parts:
            per_block = part.shape[0] // num_blocks
            own = part[block * per_block : (block + 1) * per_block].contiguous()
            digest.update(own.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def facts(self):
        config = self.core.scheduler.kv_cache_config
        return {
            "groups": [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups],
            "block_sizes": [group.kv_cache_spec.block_size for group in config.kv_cache_groups],
            "num_blocks": config.num_blocks,
            "free": self.pool.get_num_free_blocks(),
            "chunk": self.core.scheduler.max_num_scheduled_tokens,
            "retention": config.prefix_cache_retention_interval,
        }


def main():
    """Obey until the other end closes."""
    connection = Connection(int(sys.argv[1]))
    served = Served()
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(served, name)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the other end raises it
            answer = False, traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    main()
