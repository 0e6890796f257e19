"""These tests drive vLLM's own classes; without vLLM there is nothing to collect (``make test-vllm`` has it)."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
