"""What does not need Mooncake: settings, parcels, trailers, the master's HTTP, a missing library."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest
import xxhash

from hybridkv.errors import ConfigError, StoreUnavailableError
from hybridkv.stores.mooncake.master import Master
from hybridkv.stores.mooncake.parcels import Item, cut
from hybridkv.stores.mooncake.settings import MooncakeSettings, settings_of
from hybridkv.stores.mooncake.staging import Slot, Staging
from hybridkv.stores.mooncake.values import TRAILER_BYTES, key_of, name_of, trailer
from hybridkv.stores.regions import RegionTable
from hybridkv.stores.registry import parse_store_uri


def settings(uri, environment=None):
    return settings_of(parse_store_uri(uri), environment or {})


def test_a_uri_with_a_host_alone_takes_the_defaults():
    assert settings("mooncake://store.example") == MooncakeSettings(
        master="store.example:50051", http="store.example:9003"
    )


def test_every_setting_can_be_given():
    assert settings(
        "mooncake://[::1]:7?protocol=rdma&device=mlx5_0&metadata=etcd%3A%2F%2Fh&hostname=me&segment=4GiB"
        "&tenant=t&replicas=2&http=other%3A80&timeout=2.5&pack=1MiB&staging=128MiB&checksum=off"
    ) == MooncakeSettings(
        master="[::1]:7",
        protocol="rdma",
        device="mlx5_0",
        metadata="etcd://h",
        hostname="me",
        segment_bytes=4 << 30,
        tenant="t",
        replicas=2,
        http="other:80",
        timeout_s=2.5,
        pack_bytes=1 << 20,
        staging_bytes=128 << 20,
        is_checksummed=False,
    )
    assert settings("mooncake://[::1]:7").address == ("::1", 7)
    assert settings("mooncake://h:7?http=80").http == "h:80"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("mooncake://", "write mooncake://host:50051, or set MOONCAKE_CONFIG_PATH"),
        ("mooncake://h:x", "no host:port"),
        ("mooncake://h:0", "no host:port"),
        ("mooncake://h:70000", "no host:port"),
        ("mooncake://:7", "no host:port"),
        ("mooncake://h/path", "no path"),
        ("mooncake://h?segmen=1GiB", "did you mean 'segment'"),
        ("mooncake://h?segment=1MiB", "at least 16MiB"),
        ("mooncake://h?segment=many", "segment: size"),
        ("mooncake://h?staging=1MiB", "staging is at least"),
        ("mooncake://h?protocol=tpc", "did you mean 'tcp'"),
        ("mooncake://h?protocol=rdma", "needs its devices"),
        ("mooncake://h?replicas=0", "replicas is 0"),
        ("mooncake://h?replicas=1.5", "give a whole number"),
        ("mooncake://h?replicas=nan", "give a whole number"),
        ("mooncake://h?timeout=soon", "give a number"),
        ("mooncake://h?timeout=0", "seconds > 0"),
        ("mooncake://h?timeout=nan", "seconds > 0"),
        ("mooncake://h?timeout=inf", "at most 50"),
        ("mooncake://h?timeout=51", "at most 50"),
        ("mooncake://h?checksum=yes", "give on or off"),
        ("mooncake://h?http=x", "no host:port"),
    ],
)
def test_a_uri_that_makes_no_sense_says_why(uri, reason):
    with pytest.raises(ConfigError, match=reason):
        settings(uri)


def write(tmp_path, data):
    path = tmp_path / "mooncake.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return {"MOONCAKE_CONFIG_PATH": str(path)}


def test_mooncakes_own_file_is_read_by_its_own_names(tmp_path):
    environment = write(
        tmp_path,
        {
            "local_hostname": "gpu-1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "rdma",
            "device_name": "mlx5_0",
            "master_server_address": "10.0.0.1:50051",
            "global_segment_size": "4GB",
            "local_buffer_size": 1 << 30,
        },
    )
    expected = MooncakeSettings(
        master="10.0.0.1:50051",
        hostname="gpu-1",
        protocol="rdma",
        device="mlx5_0",
        segment_bytes=4 << 30,
        http="10.0.0.1:9003",
    )
    assert settings("mooncake://", environment) == expected
    assert settings("mooncake://?http=81", environment).http == "10.0.0.1:81"
    assert settings("mooncake://?segment=16MiB", environment).segment_bytes == 16 << 20
    assert settings("mooncake://other", environment).master == "other:50051"


def test_a_store_of_leaders_may_stand_in_the_file(tmp_path):
    environment = write(tmp_path, {"master_server_address": "etcd://a:2379;b:2379", "global_segment_size": 0})
    found = settings("mooncake://?http=a%3A9003", environment)
    assert (found.has_leaders, found.http, found.segment_bytes) == (True, "a:9003", 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "no master_server_address"),
        ({}, "no master_server_address"),
        ({"master_server_address": "h"}, "no host:port"),
        ({"master_server_address": 7}, "no host:port"),
        ({"master_server_address": "h:7", "protocol": ["tcp"]}, "neither a text nor a whole number"),
        ({"master_server_address": "h:7", "global_segment_size": 1.5}, "neither a text nor a whole number"),
    ],
)
def test_a_file_that_makes_no_sense_says_why(tmp_path, data, reason):
    with pytest.raises(ConfigError, match=reason):
        settings("mooncake://", write(tmp_path, data))


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        settings("mooncake://", {"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")})


def test_the_name_of_this_host_is_the_address_that_reaches_the_master():
    assert settings("mooncake://127.0.0.1").local_hostname() == "127.0.0.1"
    assert settings("mooncake://h?hostname=me").local_hostname() == "me"


def items(table, region, shapes):
    """Return items of (name, segments) laid out one after the other, a byte apart."""
    found, at = [], region.address
    for name, sizes in shapes:
        segments = []
        for size in sizes:
            segments.append((at, size))
            at += size + 1
        found.append(Item(name, name, table.resolve([segments])[0], segments))
    return found


@pytest.fixture
def table():
    found = RegionTable()
    found.region = found.register(bytearray(1 << 20))
    return found


def parcels(batch, pack_bytes, slot_bytes, trailer_bytes=24):
    return cut(batch, pack_bytes=pack_bytes, slot_bytes=slot_bytes, trailer_bytes=trailer_bytes)


def shapes_of(cut_up):
    return [[load.item.name for load in parcel.loads.values()] for parcel in cut_up]


def test_small_segments_are_packed_and_large_ones_stay_in_place(table):
    batch = items(table, table.region, [("small", [10] * 9), ("large", [100, 100]), ("mixed", [190, 10])])
    (parcel,) = parcels(batch, 100, 10_000)
    assert [load.is_packed for load in parcel.loads.values()] == [True, False, False]
    slot = Slot(1 << 30, memoryview(bytearray(10_000)), lambda: None)
    addresses, sizes = parcel.places(slot)
    assert sizes == [[90 + 24], [100, 100, 24], [190, 10, 24]]
    assert addresses[0] == [1 << 30]
    assert addresses[1][:2] == [segment[0] for segment in batch[1].segments]
    assert not parcel.is_own
    assert parcel.num_slices == 1 + 3 + 3


def test_without_a_trailer_one_piece_stays_in_place_however_small(table):
    batch = items(table, table.region, [("one", [10]), ("two", [10, 10])])
    (parcel,) = parcels(batch, 100, 1000, trailer_bytes=0)
    assert [load.is_packed for load in parcel.loads.values()] == [False, True]
    slot = Slot(1 << 30, memoryview(bytearray(1000)), lambda: None)
    assert parcel.places(slot) == ([[batch[0].segments[0][0]], [1 << 30]], [[10], [20]])
    assert parcel.num_slices == 2


def test_segments_that_touch_are_one(table):
    start = table.region.address
    segments = [(start, 100), (start + 100, 50), (start + 150, 50), (start, 10)]
    item = Item("a", "a", table.resolve([segments])[0], segments)
    (parcel,) = parcels([item], 100, 1000)
    assert list(parcel.loads[0].in_place) == [(start, 200), (start, 10)]


def test_a_parcel_keeps_within_slices_bytes_and_names(table):
    many = items(table, table.region, [(f"k{idx}", [8]) for idx in range(600)])
    assert [len(names) for names in shapes_of(parcels(many, 100, 1 << 20))] == [256, 256, 88]
    tight = items(table, table.region, [(f"k{idx}", [40]) for idx in range(5)])
    assert [len(names) for names in shapes_of(parcels(tight, 100, 128))] == [2, 2, 1]
    twins = items(table, table.region, [(name, [8]) for name in "abacb"])
    assert shapes_of(parcels(twins, 100, 1000)) == [["a", "b"], ["a", "c", "b"]]
    huge = items(table, table.region, [("a", [8]), ("huge", [500, 500]), ("b", [8])])
    assert shapes_of(parcels(huge, 1000, 200)) == [["a"], ["huge"], ["b"]]
    wide = items(table, table.region, [("wide", [1000] * 400)])
    (parcel,) = parcels(wide, 1, 1000)
    assert parcel.num_slices == 1
    assert list(parcels([], 1, 1)) == []


def test_slots_are_lent_and_large_objects_get_memory_of_their_own():
    registered = {}
    staging = Staging(64 << 10, 4, registered.__setitem__, registered.pop)
    assert list(registered.values()) == [64 << 10]
    slots = [staging.take(1000, 0) for _ in range(4)]
    assert len({slot.address for slot in slots}) == 4
    assert staging.take(1000, 0) is None
    assert staging.take(1000, 0.01) is None
    large = staging.take(1 << 20, 0)
    large.view[:] = b"x" * (1 << 20)
    assert registered[large.address] == 1 << 20
    large.give_back()
    assert list(registered.values()) == [64 << 10]
    slots[2].give_back()
    assert staging.take(16 << 10, 0).address == slots[2].address


def test_the_trailer_is_of_the_name_the_length_and_the_bytes():
    data = np.arange(100, dtype=np.uint8).data
    whole = trailer("n", 100, [data])
    assert whole == trailer("n", 100, [data[:30], data[30:]])
    seed = xxhash.xxh3_64_intdigest(b"n")
    assert whole == b"hkv-xxh3" + (100).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(
        bytes(data), seed=seed
    ).to_bytes(8, "little")
    others = [trailer("m", 100, [data]), trailer("n", 99, [data]), trailer("n", 100, [data[1:]])]
    assert whole not in [*others, trailer("n", 100, [data, data])]
    assert len(whole) == TRAILER_BYTES


@pytest.mark.parametrize("key", ["a", "hkv1/f/0/0/ab", "a,b", ",", "".join(map(chr, range(0x21, 0x7F)))])
def test_names_and_keys_are_told_apart_and_back(key):
    assert key_of(name_of(key)) == key
    assert "," not in name_of(key)
    assert key_of(key) is None


@pytest.fixture
def http():
    """A server whose answers a test sets."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.get(self.path.partition("?")[0], "").encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    answers["address"] = f"127.0.0.1:{server.server_port}"
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_answers_but_is_no_master_is_named(http):
    master = Master(http["address"])
    http["/get_all_keys"] = "a\nb\n"
    assert master.names() == ["a", "b"]
    for answer in ["", "[]", '{"data": {"a": 7}}', '{"x": 1}']:
        http["/batch_query_keys"] = answer
        with pytest.raises(StoreUnavailableError, match="no Mooncake master"):
            list(master.sizes(["a"]))
    with pytest.raises(StoreUnavailableError, match="no Mooncake master"):
        master.counts()
    assert not master.is_frozen(1.0)


def test_an_object_on_disk_alone_has_its_size(http):
    replica = {"object_size": 7}
    http["/batch_query_keys"] = json.dumps(
        {"data": {"a": {"values": None, "local_disk_values": [replica]}, "b": {"values": None}}}
    )
    assert list(Master(http["address"]).sizes(["a", "b"])) == [("a", 7)]


def test_without_an_http_interface_listing_says_what_is_missing():
    with pytest.raises(StoreUnavailableError, match="add http=host:port"):
        Master("").names()


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("", "pip install 'hybridkv[mooncake]'"),
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file')",
            "apt-get install libibverbs1",
        ),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(tmp_path, library, reason):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    if library:
        (tmp_path / "mooncake" / "store.py").write_text(library)
    script = "from hybridkv.stores.registry import open_store; open_store('mooncake://h')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "ConfigError" in done.stderr
    assert reason in done.stderr
