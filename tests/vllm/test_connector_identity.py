"""Which engines share bytes: models, weights, element types, hashes, told apart by what they are."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from tests.vllm.tiny_models import write_gemma3
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from hybridkv.adapters.vllm import identity
from hybridkv.errors import ConfigError
from vllm import EngineArgs

pytestmark = pytest.mark.filterwarnings("default:::vllm")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "same-name"
    write_gemma3(path)
    return path


def model_config(path, **changes):
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, **{"dtype": "float32", **changes})
    return args.create_model_config()


def cache(dtype=torch.float32, layout="LBHNC"):
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=dtype)
    groups = [KVCacheGroupSpec(["model.0"], spec)]
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout=layout, hash_block_size=32
    )


def engine(model, **changes):
    """What of a ``VllmConfig`` counts."""
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=changes.pop("algorithm", "sha256"), cache_dtype="auto"
        ),
        load_config=SimpleNamespace(load_format=changes.pop("load_format", "auto")),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=changes.pop("backend", None)),
        parallel_config=SimpleNamespace(pipeline_parallel_size=changes.pop("pp", 1)),
        speculative_config=changes.pop("speculative", None),
    )


def namespace(model, *, dtype=torch.float32, version=None, **changes):
    return identity.namespace_of(engine(model, **changes), cache(dtype), model_version=version)


def test_the_same_model_elsewhere_is_the_same(directory, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(directory, moved)
    assert namespace(model_config(directory)) == namespace(model_config(moved))
    assert str(directory) not in str(namespace(model_config(directory)))


def test_other_weights_under_the_same_name_are_another_model(directory, tmp_path):
    twin = tmp_path / "same-name"
    write_gemma3(twin, seed=1)
    assert namespace(model_config(directory)) != namespace(model_config(twin))


def test_a_few_changed_bytes_of_the_weights_show(directory, tmp_path):
    twin = tmp_path / "same-name"
    shutil.copytree(directory, twin)
    weights = next(twin.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert namespace(model_config(directory)) != namespace(model_config(twin))


def test_another_rope_scaling_is_another_model_even_under_a_given_version(directory, tmp_path):
    twin = tmp_path / "same-name"
    shutil.copytree(directory, twin)
    text = json.loads((twin / "config.json").read_text())
    text["rope_theta"] = 5000.0
    text.setdefault("rope_parameters", {}).setdefault("full_attention", {})["rope_theta"] = 5000.0
    (twin / "config.json").write_text(json.dumps(text))
    first, second = (namespace(model_config(path), version="v1") for path in (directory, twin))
    assert first != second
    assert first.model_version.startswith("v1, config ")


def test_overrides_of_the_configuration_count(directory):
    overridden = model_config(directory, hf_overrides={"query_pre_attn_scalar": 16})
    assert namespace(overridden, version="v1") != namespace(model_config(directory), version="v1")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"algorithm": "sha256_cbor"},
        {"backend": "FLASH_ATTN"},
        {"pp": 2},
        {"version": "mine"},
    ],
)
def test_what_makes_other_bytes_is_another_namespace(directory, changes):
    model = model_config(directory)
    assert namespace(model) != namespace(model, **changes)


def test_a_draft_model_counts(directory):
    model = model_config(directory)
    speculative = SimpleNamespace(method="eagle", draft_model_config=model)
    assert namespace(model, speculative=speculative) != namespace(model)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_without_weight_files_a_version_must_be_given(directory, tmp_path, load_format):
    bare = tmp_path / "bare"
    shutil.copytree(
        directory, bare, ignore=shutil.ignore_patterns(*(["*.safetensors"] * (load_format == "auto")))
    )
    model = model_config(bare)
    with pytest.raises(ConfigError, match="give model_version, a text that you change whenever"):
        namespace(model, load_format=load_format)
    assert namespace(model, load_format=load_format, version="v1").model_version.startswith("v1")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_are_not_the_same_everywhere_are_refused_with_the_remedy(directory, algorithm):
    with pytest.raises(ConfigError, match="use sha256 or sha256_cbor"):
        namespace(model_config(directory), algorithm=algorithm)


def test_the_root_of_the_hashes_is_vllm_s(directory, monkeypatch):
    root = namespace(model_config(directory)).hash_root
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    assert kv_cache_utils.NONE_HASH.hex() == root
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert namespace(model_config(directory)).hash_root != root


def test_a_configuration_of_odd_values_has_the_same_digest_in_every_process():
    odd = {"sets": {"b", "a"}, "none": None, "dtype": torch.float16, "object": object(), 3: (1, 2.5)}
    twin = {"sets": {"a", "b"}, "none": None, "dtype": torch.float16, "object": object(), 3: (1, 2.5)}
    assert identity._plain(odd) == identity._plain(twin)
