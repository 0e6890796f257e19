"""What a user may configure, and what a request may ask for."""

import pytest

from hybridkv.adapters.vllm.settings import ConnectorSettings, RequestSettings, describe
from hybridkv.errors import ConfigError

STORE = "local:///dev/shm/hybridkv?capacity=1GiB"


def test_only_the_store_must_be_given():
    settings = ConnectorSettings.of({"store": STORE})
    assert settings.retention == "all"
    assert settings.lookup_async
    assert settings.load_async
    assert not settings.save_decode_cache
    assert settings.scheduler(1000).pinned_blocks == 250


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "store is missing: URI of the store"),
        ({"store": 7}, "store is 7; give a text"),
        ({"store": ""}, "store is ''; give a text"),
        ({"store": STORE, "retension": 0}, "unknown key 'retension'; did you mean 'retention'"),
        ({"store": STORE, "retention": "some"}, "retention is 'some'; give 'all', 0 or a number of tokens"),
        ({"store": STORE, "retention": True}, "retention is True"),
        ({"store": STORE, "lookup_timeout_s": 0}, "lookup_timeout_s is 0; give a number of seconds > 0"),
        ({"store": STORE, "lookup_timeout_s": float("nan")}, "lookup_timeout_s is nan"),
        ({"store": STORE, "save_decode_cache": "yes"}, "save_decode_cache is 'yes'; give true or false"),
        ({"store": STORE, "pinned_share": 2}, r"pinned_share is 2; give a number in \(0, 1\]"),
        ({"store": STORE, "slot_bytes": "32 MB!"}, "slot_bytes is '32 MB!'; size '32 MB!' is not"),
        ({"store": STORE, "num_slots": 0}, "num_slots is 0; give an integer >= 1"),
        ({"store": STORE, "load_async": False}, "load_async is false; .* remove it"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config: {message}"):
        ConnectorSettings.of(extra)


def test_sizes_are_texts_or_numbers():
    settings = ConnectorSettings.of({"store": STORE, "slot_bytes": "1MiB", "write_bytes_per_s": 1000})
    assert settings.mover(100).slot_bytes == 1 << 20
    assert settings.mover((1 << 20) + 1).slot_bytes == (1 << 20) + 64  # an object always fits
    assert settings.mover(100).write_bytes_per_s == 1000
    assert ConnectorSettings.of({"store": STORE, "write_bytes_per_s": None}).write_bytes_per_s is None


def test_every_key_is_described():
    rows = {row.name: row for row in describe()}
    assert set(rows) == set(ConnectorSettings.__slots__)
    assert all(row.meaning for row in rows.values())
    assert rows["store"].default == ""
    assert rows["lookup_timeout_s"].unit == "s"


@pytest.mark.parametrize(
    ("params", "save", "load"),
    [
        (None, True, True),
        ({"do_remote_prefill": True}, True, True),
        ({"hybridkv": {"save": False}}, False, True),
        ({"hybridkv": {"save": False, "load": False}}, False, False),
        ({"hybridkv": {}}, True, True),
    ],
)
def test_a_request_may_opt_out(params, save, load):
    assert RequestSettings.of(params) == RequestSettings(save=save, load=load)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no", "give an object such as"),
        ({"sav": False}, "unknown key 'sav'; did you mean 'save'"),
        ({"save": 0}, "save is 0; give true or false"),
    ],
)
def test_a_request_that_cannot_be_understood_is_an_error(given, message):
    with pytest.raises(ConfigError, match=message):
        RequestSettings.of({"hybridkv": given})
