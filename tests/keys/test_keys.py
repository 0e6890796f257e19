"""Keys, fingerprints, manifests and block hashes; golden vectors pin their bytes for ever."""

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import KeySchemeError
from hybridkv.keys import BlockHasher, KeyScheme, Manifest, Namespace, spec_group_of, vllm_mooncake
from hybridkv.specs.layout_file import find_layout
from hybridkv.stores.base import MAX_KEY_CHARS

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
NAMESPACE = Namespace(model_version="w-1", kv_dtype="bfloat16")
LAYOUT = find_layout("deepseek-v4")


def manifest(namespace=NAMESPACE, layout=LAYOUT):
    return Manifest.of(namespace, layout)


def scheme(layout=LAYOUT, digest_bytes=2):
    return KeyScheme(NAMESPACE, layout, digest_bytes=digest_bytes)


def _resized(group, layers, layer_block_bytes):
    """The same object bytes, put together otherwise."""
    return replace(group, layers=layers, layer_block_bytes=layer_block_bytes)


def _halves(group):
    return replace(group, name="a", layers=20), replace(group, name="b", layers=23)


@pytest.mark.parametrize("vector", GOLDEN["fingerprints"], ids=lambda v: v["model"])
def test_fingerprints_never_change(vector):
    layout = find_layout(vector["model"]).with_tp(vector["tp"])
    namespace = Namespace(
        **{**vector["namespace"], "state_dtypes": tuple(vector["namespace"]["state_dtypes"])}
    )
    assert Manifest.of(namespace, layout).fingerprint == vector["fingerprint"]


@pytest.mark.parametrize("vector", GOLDEN["block_hashes"])
def test_block_hashes_never_change(vector):
    hasher = BlockHasher(hash_unit=vector["hash_unit"], salt=vector["salt"], lora=vector["lora"])
    assert hasher.hash_tokens(vector["tokens"]).hex() == "".join(vector["hashes"])


@pytest.mark.parametrize("vector", GOLDEN["keys"])
def test_keys_never_change(vector):
    layout = find_layout(vector["model"]).with_tp(vector["tp"])
    made = KeyScheme(NAMESPACE, layout, digest_bytes=vector["digest_bytes"])
    blob = bytes.fromhex(vector["blob"])
    assert (
        made.keys(vector["spec_group"], vector["rank"], np.array(vector["objects"]), blob) == vector["keys"]
    )


def test_a_key_holds_the_last_hash_inside_its_object():
    blob = bytes(range(128)) + bytes(range(128))
    fingerprint = manifest().fingerprint
    assert scheme().keys(0, 0, range(1), blob) == [f"hkv1/{fingerprint}/0/0/7e7f"]
    assert scheme().keys(3, 0, range(1, 3), blob) == [f"hkv1/{fingerprint}/3/0/{h}" for h in ("0203", "0405")]
    assert scheme().keys(4, 0, np.array([0, 2]), blob) == [
        f"hkv1/{fingerprint}/4/0/{h}" for h in ("0203", "0a0b")
    ]
    assert scheme().keys(1, 0, range(2, 2), blob) == []


def test_objects_of_several_blocks_are_named_by_their_last_block():
    layout = LAYOUT.with_object_tokens(512)
    blob = bytes(range(256))
    assert scheme(layout).keys(0, 0, range(1), blob)[0].endswith("/feff")


def test_a_range_may_have_a_step():
    every, other = (
        scheme().keys(3, 0, range(4), bytes(range(16))),
        scheme().keys(3, 0, range(0, 4, 2), bytes(range(16))),
    )
    assert other == every[::2]


@pytest.mark.parametrize("objects", [range(1, 3), np.array([-1])])
def test_only_complete_objects_have_a_key(objects):
    with pytest.raises(KeySchemeError, match="complete"):
        scheme().keys(0, 0, objects, bytes(128))


def test_the_longest_keys_fit_every_store():
    key = scheme(digest_bytes=32).keys(4, 0, range(1), bytes(64))[0]
    assert len(key) <= MAX_KEY_CHARS
    assert spec_group_of(key) == 4


def test_a_blob_that_ends_inside_a_hash_is_refused():
    with pytest.raises(KeySchemeError, match="127 bytes are no whole number"):
        scheme().keys(0, 0, range(1), bytes(127))


@pytest.mark.parametrize("key", ["", "a/b/c/d/e", "hkv1/f/x/0/h", "hkv1/f/0/h", "hkv2/f/0/0/h"])
def test_a_foreign_key_names_no_spec_group(key):
    with pytest.raises(KeySchemeError, match="not of scheme"):
        spec_group_of(key)


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_of_a_namespace_separates(field):
    other = {"weights_epoch": 1, "state_dtypes": ("float32",)}.get(field, "other")
    changed = manifest(replace(NAMESPACE, **{field: other}))
    assert changed.fingerprint != manifest().fingerprint
    (line,) = manifest().differences(changed)
    assert line.startswith(f"namespace.{field}")


@pytest.mark.parametrize(
    "other",
    [
        find_layout("deepseek-v3"),
        LAYOUT.with_object_tokens(512),
        replace(LAYOUT, hash_unit=2),
        replace(LAYOUT, groups=LAYOUT.groups[:4]),
        replace(LAYOUT, groups=(replace(LAYOUT.groups[0], layers=44), *LAYOUT.groups[1:])),
        replace(LAYOUT, groups=(*LAYOUT.groups[1:], LAYOUT.groups[0])),
        replace(LAYOUT, groups=(_resized(LAYOUT.groups[0], 86, 18_720), *LAYOUT.groups[1:])),
        replace(LAYOUT, groups=(*_halves(LAYOUT.groups[0]), *LAYOUT.groups[1:])),
    ],
)
def test_every_difference_of_the_layout_separates(other):
    assert manifest(layout=other).fingerprint != manifest().fingerprint
    assert manifest().differences(manifest(layout=other))


def test_ranks_whose_bytes_differ_separate_and_equal_ones_share():
    llama, mla = find_layout("llama-3.1-8b"), find_layout("deepseek-v3")
    assert manifest(layout=llama).fingerprint != manifest(layout=llama.with_tp(2)).fingerprint
    assert manifest(layout=mla).fingerprint == manifest(layout=mla.with_tp(8)).fingerprint


def test_retention_and_names_are_no_part_of_a_namespace():
    renamed = replace(LAYOUT, name="other", source="elsewhere")
    assert manifest(layout=renamed).fingerprint == manifest().fingerprint


def test_a_manifest_survives_its_text():
    assert Manifest.from_json(manifest().to_json()) == manifest()
    assert manifest().differences(manifest()) == []


def _changed(path, value):
    raw = json.loads(manifest().to_json())
    where = raw
    for name in path[:-1]:
        where = where[name]
    if value is None:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "manifest is list"),
        (_changed(["groups"], {}), "groups is dict, not a list"),
        (_changed(["groups", 0], 3), r"groups\[0\] is int"),
        (_changed(["namespace"], "x"), "namespace is str"),
        (_changed(["namespace", "kv_dtype"], 7), "namespace.kv_dtype is 7"),
        (_changed(["namespace", "weights_epoch"], True), "weights_epoch is True"),
        (_changed(["namespace", "state_dtypes"], "ab"), "state_dtypes is str"),
        (_changed(["groups", 1, "object_byte"], 7), "did you mean 'object_bytes'"),
        (_changed(["hash_unit"], None), "manifest.hash_unit is missing"),
        (_changed(["scheme"], "hkv9"), "scheme is 'hkv9'"),
        (_changed(["payload_version"], 999), "payload version 999"),
        (_changed(["hash_unit"], -5), "hash_unit is -5"),
        (_changed(["namespace", "state_dtypes"], [1]), "something else than texts"),
        (_changed(["namespace", "state_dtypes"], json.loads("[" * 900 + "]" * 900)), "else than texts"),
    ],
)
def test_a_wrong_manifest_names_its_field(text, message):
    with pytest.raises(KeySchemeError, match=message):
        Manifest.from_json(text)


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, tokens)
def test_hashes_are_equal_exactly_as_far_as_the_prompts_are(shared, one, two):
    hasher = BlockHasher(hash_unit=4)
    a, b = shared + one, shared + two
    equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    hashes = [
        [h[i : i + 32] for i in range(0, len(h), 32)] for h in (hasher.hash_tokens(a), hasher.hash_tokens(b))
    ]
    assert [len(h) for h in hashes] == [len(a) // 4, len(b) // 4]
    for i, pair in enumerate(zip(*hashes, strict=False)):
        assert (pair[0] == pair[1]) == ((i + 1) * 4 <= equal)


def test_a_hash_is_sha256_over_its_parent_and_the_tokens():
    hasher = BlockHasher(hash_unit=2)
    words = b"".join(token.to_bytes(4, "little") for token in (7, 8))
    assert hasher.hash_tokens([7, 8, 9]) == hashlib.sha256(hasher.root + words).digest()


def test_a_lora_named_like_a_salt_shares_nothing_with_it():
    roots = {
        BlockHasher(hash_unit=4, salt=s, lora=x).root for s, x in [("", ""), ("a", ""), ("", "a"), ("a", "a")]
    }
    assert len(roots) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        [2**32],
        [[1, 2]],
        ["a"],
        [2**70],
        [1.5],
        ["1"],
        [True],
        [1j],
        [[1], [1, 2]],
        np.array([1.0, 2.0]),
    ],
)
def test_only_token_ids_are_hashed(wrong):
    with pytest.raises(KeySchemeError, match="token ids"):
        BlockHasher(hash_unit=1).hash_tokens(wrong)


@pytest.mark.parametrize("text", ["\ud800", "\ud800\udc00"])
def test_lone_surrogates_name_nothing(text):
    # The second one would spell U+10000 in JSON's escapes.
    with pytest.raises(KeySchemeError, match="valid Unicode"):
        BlockHasher(hash_unit=1, salt=text)
    with pytest.raises(KeySchemeError, match="valid Unicode"):
        _ = manifest(replace(NAMESPACE, model_version=text)).fingerprint


def test_a_hash_unit_holds_at_least_one_token():
    with pytest.raises(KeySchemeError, match="hash_unit is 0"):
        BlockHasher(hash_unit=0)


def test_vllms_in_tree_keys_are_spelled_as_it_spells_them():
    text = "test-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@6833"
    assert vllm_mooncake(model="test-model", group=1, block_hash=b"h3") == text
    assert vllm_mooncake(model="test-model", group=1, block_hash=b"h3", cache_prefix="p") == f"p@{text}"
    other = vllm_mooncake(
        model="m", group=0, block_hash=b"\x00", tp_rank=1, pcp_rank=2, dcp_rank=3, pp_rank=4
    )
    assert other == "m@tp_rank:1@pcp2@dcp3@pp_rank:4@group:0@00"
