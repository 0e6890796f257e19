"""These tests drive vLLM's own classes: ``make test-vllm`` installs it; without it nothing is collected."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A Mooncake master and a storage node in processes of their own; tests leave them empty."""
    from hybridkv.stores.mooncake.trial import TrialCluster  # noqa: PLC0415 - see above

    running = TrialCluster(tmp_path_factory.mktemp("cluster"), segment_bytes=256 << 20)
    yield running
    running.close()
