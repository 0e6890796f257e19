"""The commands on stores."""

import json
import sys

import numpy as np
import pytest

from hybridkv.cli import main
from hybridkv.stores.local.geometry import KEY_WORD
from hybridkv.stores.local.store import LocalStore

KEYS = {"hkv1/abcd/0/0/ff": 5000, "hkv1/abcd/1/0/ee": 100, "hkv1/ef01/1/1/ee": 10, "x": 1}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `hybridkv store` and returns (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hybridkv", "store", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            sys.exit(main())
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def uri(tmp_path):
    store = LocalStore(tmp_path / "kv", 2**20)
    region = store.register(np.ones(8192, dtype=np.uint8))
    store.put(list(KEYS), [[(region.address, size)] for size in KEYS.values()])
    store.close()
    return f"local://{tmp_path / 'kv'}"


def listed(run, uri, *options):
    code, out, _ = run("ls", uri, *options, "--json", "-")
    assert code == 0
    return {info["key"] for info in json.loads(out)}


def test_stat_counts_by_namespace_and_spec_group(run, uri):
    code, out, _ = run("stat", uri)
    assert code == 0
    assert "4 objects, 4.99KiB of 1MiB" in out
    data = json.loads(run("stat", uri, "--json", "-")[1])
    assert (data["objects"], data["used_bytes"], data["capacity_bytes"]) == (4, 5111, 2**20)
    assert {"namespace": "abcd", "spec_group": "1", "objects": 1, "bytes": 100} in data["groups"]
    assert "no limit" in run("stat", "memory://")[1]


def test_ls_shows_bytes_age_and_key(run, uri):
    code, out, _ = run("ls", uri)
    assert code == 0
    assert [line.split()[::2] for line in out.splitlines()] == [
        [str(size), key] for key, size in sorted(KEYS.items())
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], set(KEYS)),
        (["--namespace", "ab"], {"hkv1/abcd/0/0/ff", "hkv1/abcd/1/0/ee"}),
        (["--spec-group", 1], {"hkv1/abcd/1/0/ee", "hkv1/ef01/1/1/ee"}),
        (["--spec-group", 1, "--rank", 1], {"hkv1/ef01/1/1/ee"}),
        (["--older-than", 0], set(KEYS)),
        (["--older-than", 3600], set()),
    ],
)
def test_options_select_objects(run, uri, options, expected):
    assert listed(run, uri, *options) == expected


def test_rm_removes_what_is_given_or_selected(run, uri):
    assert "removed 1 objects" in run("rm", uri, "x", "absent", "x")[1]
    assert "removed 1 objects" in run("rm", uri, "--namespace", "ef")[1]
    assert listed(run, uri) == {"hkv1/abcd/0/0/ff", "hkv1/abcd/1/0/ee"}
    assert "removed 2 objects" in run("clear", uri)[1]
    assert listed(run, uri) == set()


@pytest.mark.parametrize("arguments", [[], ["x", "--rank", 1]])
def test_rm_wants_either_keys_or_options(run, uri, arguments):
    code, _, err = run("rm", uri, *arguments)
    assert code == 2
    assert "either keys or options" in err
    assert listed(run, uri) == set(KEYS)


def test_check_exits_1_until_what_is_wrong_is_fixed(run, uri, tmp_path):
    assert run("check", uri)[0] == 0
    store = LocalStore(tmp_path / "kv")
    place, _ = store._table.places(store._table.published()[:1])
    store._directory.arena[int(place[0])] ^= 1
    store.close()
    code, out, _ = run("check", uri)
    assert (code, "1 errors (1 corrupt, 0 lost)" in out) == (1, True)
    assert run("check", uri, "--fix", "--json", tmp_path / "report.json")[0] == 1
    assert json.loads((tmp_path / "report.json").read_text())["errors"] == 1
    assert run("check", uri)[0] == 0
    assert len(listed(run, uri)) == len(KEYS) - 1


def test_an_object_whose_record_is_damaged_is_no_obstacle(run, uri, tmp_path):
    store = LocalStore(tmp_path / "kv")
    store._table.records[store._table.published()[0], KEY_WORD] ^= np.uint64(0x80)
    store.close()
    assert len(listed(run, uri)) == len(KEYS) - 1
    data = json.loads(run("stat", uri, "--json", "-")[1])
    assert data["objects"] == sum(group["objects"] for group in data["groups"])
    code, out, _ = run("clear", uri)
    assert (code, f"removed {len(KEYS) - 1} objects" in out) == (0, True)
    assert run("check", uri, "--fix")[0] == 1
    assert run("check", uri)[0] == 0


def test_a_store_that_cannot_do_it_says_so(run, monkeypatch):
    assert "a MemoryStore does not check itself" in run("check", "memory://")[2]

    class Bare:
        def close(self):
            pass

    monkeypatch.setattr("hybridkv.cli_store.open_store", lambda _: Bare())
    assert "a Bare does not list its objects" in run("ls", "bare://")[2]
    assert "a Bare does not count its objects" in run("stat", "bare://")[2]


def test_an_unknown_directory_is_bad_input_and_is_not_made(run, tmp_path):
    code, _, err = run("stat", f"local://{tmp_path / 'nowhere'}")
    assert (code, "does not exist yet" in err) == (2, True)
    assert not (tmp_path / "nowhere").exists()
