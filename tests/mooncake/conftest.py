"""These tests drive a real Mooncake: ``make test-mooncake`` installs it; without it nothing is collected."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("mooncake") else ["*.py"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A master and two storage nodes in processes of their own; tests leave them as they were."""
    from hybridkv.stores.mooncake.trial import TrialCluster

    running = TrialCluster(tmp_path_factory.mktemp("cluster"), num_nodes=2, segment_bytes=256 << 20)
    yield running
    running.close()


@pytest.fixture
def store(cluster):
    """An empty store with a client of its own."""
    from hybridkv.stores.registry import open_store

    opened = open_store(cluster.uri)
    opened.discard([info.key for info in opened.list()])
    yield opened
    opened.close()
