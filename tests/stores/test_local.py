import tempfile
from pathlib import Path

import pytest

from hybridkv.stores.local.store import LocalStore
from hybridkv.testing.stores import StoreTests, run_store_machine

SLOT = 4096  # the smallest place that an object takes


class TestLocalStore(StoreTests):
    object_bytes = SLOT

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path / "store"

    def make_store(self, capacity_bytes):
        return LocalStore(self.path, 1000 * SLOT if capacity_bytes is None else capacity_bytes)


def make_fresh(capacity_bytes):
    return LocalStore(Path(tempfile.mkdtemp(dir=make_fresh.root)) / "store", capacity_bytes or 100 * SLOT)


@pytest.fixture(autouse=True)
def _root(tmp_path):
    make_fresh.root = tmp_path


def test_a_store_with_room_equals_a_dict():
    run_store_machine(make_fresh, object_bytes=(16, 4000, SLOT))


def test_a_full_store_gives_up_only_what_the_capacity_forces():
    run_store_machine(make_fresh, capacity_bytes=4 * SLOT, object_bytes=(4000, 4040, SLOT))
