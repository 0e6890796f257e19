import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hybridkv.cli_mooncake import Place, _try_lock
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench, payload


def hybridkv(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybridkv.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def processes_of(text):
    """Return the pids of the processes whose command line has a text in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if str(text).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.fixture
def place(tmp_path):
    yield tmp_path
    hybridkv("mooncake", "down", f"--directory={tmp_path}")


def up(place, *arguments):
    return hybridkv(
        "mooncake", "up", "--segment=64MiB", f"--directory={place}", "--detach", "--json=-", *arguments
    )


def test_a_detached_cluster_serves_until_it_is_taken_down(place):
    told = json.loads(up(place, "--nodes=2").stdout)
    assert (told["nodes"], told["segment_bytes"]) == (2, 64 << 20)
    store = open_store(told["uri"])
    assert store.stats().capacity_bytes == 128 << 20
    store.close()
    refused = up(place)
    assert refused.returncode == 2
    assert "runs already" in refused.stderr
    down = hybridkv("mooncake", "down", f"--directory={place}")
    assert (down.returncode, down.stdout.split()) == (0, ["ended", told["uri"]])
    assert processes_of(place) == []
    again = hybridkv("mooncake", "down", f"--directory={place}")
    assert again.returncode == 2
    assert "no cluster runs" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_cluster_ends_with_the_command_however_it_ends(tmp_path, number):
    command = [sys.executable, "-m", "hybridkv.cli", "mooncake", "up", "--segment=64MiB"]
    process = subprocess.Popen(
        [*command, f"--directory={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    uri = process.stdout.readline().strip()
    assert uri.startswith("mooncake://127.0.0.1:")
    port = uri.partition("?")[0].rpartition(":")[2]
    assert len(processes_of(f"127.0.0.1:{port}")) == 1  # the node; the master names its port alone
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    deadline_s = time.monotonic() + 10
    while processes_of(f"127.0.0.1:{port}") or processes_of(f"rpc_port={port}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert "no cluster runs" in hybridkv("mooncake", "down", f"--directory={tmp_path}").stderr


def test_a_cluster_that_was_killed_is_not_taken_for_the_one_that_starts(place):
    killed = json.loads(up(place).stdout)
    os.kill(killed["pid"], signal.SIGKILL)
    with suppress(OSError):
        while True:
            os.kill(killed["pid"], 0)
            time.sleep(0.05)
    told = json.loads(up(place).stdout)
    assert told["pid"] != killed["pid"]
    open_store(told["uri"]).close()


def test_who_asks_whether_a_cluster_runs_is_not_in_the_way_of_one_that_starts(tmp_path):
    place = Place(tmp_path)
    with place._lock_file() as probe:
        assert _try_lock(probe)
        timer = threading.Timer(0.1, probe.close)
        timer.start()
        with place.held():
            assert place.is_held()
        timer.join()


def test_what_cannot_start_says_why(tmp_path, cluster):
    taken = cluster.uri.partition("?")[0].rpartition(":")[2]
    for arguments, reason in [
        (["--segment=1MiB"], "at least 16MiB"),
        (["--segment=64MiB", f"--port={taken}"], f"port {taken} cannot be used: Address already in use"),
        (["--segment=64MiB", "--directory=/proc/x"], "cannot be used"),
        (
            ["--segment=64MiB", "--detach", f"--port={taken}"],
            f"port {taken} cannot be used: Address already in use",
        ),
    ]:
        failed = hybridkv("mooncake", "up", f"--directory={tmp_path}", *arguments)
        assert failed.returncode == 2
        assert reason in failed.stderr


def test_the_store_commands_stay_within_a_namespace(cluster, store):
    bench = Workbench(store, 1 << 20)
    for fingerprint, group, count in [("aaaa", 0, 3), ("aaaa", 1, 2), ("bbbb", 0, 4)]:
        for idx in range(count):
            bench.put(f"hkv1/{fingerprint}/{group}/0/{idx:04x}", payload(idx, 1000))
    everything = json.loads(hybridkv("store", "stat", cluster.uri, "--json=-").stdout)
    assert (everything["objects"], everything["used_bytes"]) == (9, 9000)
    assert [(group["namespace"], group["objects"]) for group in everything["groups"]] == [
        ("aaaa", 3),
        ("aaaa", 2),
        ("bbbb", 4),
    ]
    one = json.loads(hybridkv("store", "stat", cluster.uri, "--namespace=bb", "--json=-").stdout)
    assert [(group["namespace"], group["bytes"]) for group in one["groups"]] == [("bbbb", 4000)]
    listed = json.loads(hybridkv("store", "ls", cluster.uri, "--namespace=aaaa", "--json=-").stdout)
    assert len(listed) == 5
    cleared = json.loads(hybridkv("store", "clear", cluster.uri, "--namespace=aaaa", "--json=-").stdout)
    assert cleared == {"removed_objects": 5}
    assert len(list(store.list())) == 4


def test_the_store_commands_say_when_the_master_is_away():
    failed = hybridkv("store", "ls", "mooncake://127.0.0.1:9?http=9")
    assert failed.returncode == 2
    assert "HTTP interface at 127.0.0.1:9 does not answer" in failed.stderr


def test_a_storage_node_without_a_master_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "hybridkv.stores.mooncake.node", "mooncake://127.0.0.1:9?segment=16MiB"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "hybridkv: Mooncake's client of 127.0.0.1:9 cannot be set up" in done.stderr
    assert "Traceback" not in done.stderr
