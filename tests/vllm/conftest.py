"""These tests drive vLLM's own classes: ``make test-vllm`` installs it; without it nothing is collected."""

import os
from importlib.util import find_spec

import pytest

# Read when vLLM is imported: nothing of it may look for a network.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}

collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A Mooncake master and a storage node in processes of their own; tests leave them empty."""
    from hybridkv.stores.mooncake.trial import TrialCluster  # noqa: PLC0415 - see above

    running = TrialCluster(tmp_path_factory.mktemp("cluster"), segment_bytes=256 << 20)
    yield running
    running.close()
