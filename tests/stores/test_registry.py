import subprocess
import sys

import pytest

from hybridkv.errors import ConfigError
from hybridkv.stores.base import PutResult
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.registry import StoreUri, open_store, parse_store_uri


def test_a_memory_store_opens_with_its_capacity():
    store = open_store("memory://?capacity=2GiB")
    assert isinstance(store, MemoryStore)
    assert store.stats().capacity_bytes == 2 * 2**30


def test_a_memory_store_without_capacity_has_no_limit():
    assert open_store("memory://").stats().capacity_bytes is None


def test_the_parts_of_a_uri_are_told_apart():
    assert parse_store_uri("local://host:80/a%20b/c?capacity=64GiB&name=x%3Dy") == StoreUri(
        scheme="local", authority="host:80", path="/a b/c", query={"capacity": "64GiB", "name": "x=y"}
    )
    assert parse_store_uri("MEMORY://") == StoreUri(scheme="memory")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", "begins with its scheme"),
        ("memory", "begins with its scheme"),
        ("memory:", "begins with its scheme"),
        ("memory:/x", "begins with its scheme"),
        ("://x", "begins with its scheme"),
        ("memory://[", "malformed"),
        ("memory://?capacity", "malformed"),
        ("memory://?capacity=1GiB&", "malformed"),
        ("memory://?capacity=", "has no value"),
        ("memory://?capacity=1GiB&capacity=1GiB", "given twice"),
        ("memory://?capacity=1GiB#x", "no fragment"),
        ("memory://?capacity=0", "memory store: capacity: .* not in"),
        ("memory://?capacity=-1GiB", "memory store: capacity: .* not a plain number"),
        ("memory://?capacity=99999999TiB", "memory store: capacity: .* not in"),
        ("memory://?capacity=1XB", "memory store: capacity: .* unknown unit"),
        ("memory://?capcity=1GiB", "unknown setting 'capcity'; did you mean 'capacity'"),
        ("memory://?zzz=1", r"unknown setting 'zzz' \(known: capacity\)"),
        ("memory://host", "no place"),
        ("memory:///path", "no place"),
        ("memry://", "unknown store 'memry'; did you mean 'memory'"),
        ("zzz://", r"unknown store 'zzz' \(known: .*memory"),
    ],
)
def test_a_uri_that_makes_no_sense_is_a_config_error_that_says_why(uri, reason):
    with pytest.raises(ConfigError, match=reason):
        open_store(uri)


def test_a_store_without_settings_says_so():
    with pytest.raises(ConfigError, match=r"known: none"):
        parse_store_uri("x://?a=1").check_settings()


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """An installed package that adds the scheme ``other`` and claims ``memory``."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    points = "[hybridkv.stores]\nother = other_package:open_other\nmemory = other_package:open_other\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "other_package.py").write_text(
        "from hybridkv.stores.memory import MemoryStore\n"
        "def open_other(uri):\n"
        "    return MemoryStore(uri.num_bytes('room'), keep_payloads=False)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("other_package")
def test_another_package_adds_a_store_by_its_entry_point():
    store = open_store("other://?room=10")
    assert store.put(["a"], [[(0, 11)]]) == [PutResult.REFUSED]
    with pytest.raises(ConfigError, match="did you mean 'other'"):
        open_store("othr://")


@pytest.mark.usefixtures("other_package")
def test_another_package_cannot_replace_a_built_in_store():
    assert open_store("memory://?capacity=7").stats().capacity_bytes == 7


def test_a_backend_is_imported_only_when_it_is_opened():
    code = "import sys, hybridkv.stores.registry; sys.exit('hybridkv.stores.memory' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
