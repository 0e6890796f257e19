"""Layouts from TOML files and from the built-in catalogue, which is such files.

::

    name = "my-model"
    source = "where the numbers come from"
    hash_unit = 16                 # optional

    [[groups]]
    name = "sliding"
    kind = "sliding_window"        # full | mla | sliding_window | chunked_local | recurrent
    block_size = 16
    window = 128                   # what the kind asks for: window, extra; chunk
    layers = 18
    kv_heads = 8                   # these three, or layer_block_bytes (and shards)
    head_dim = 64
    dtype_bytes = 2
    lookahead = 16                 # optional
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

from hybridkv.errors import ConfigError, SpecError
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.table import spec_class
from hybridkv.suggest import nearest

_LAYOUT_FIELDS = ("name", "source", "hash_unit", "groups")
_HEADS = ("kv_heads", "head_dim", "dtype_bytes")
_GROUP_FIELDS = (
    "name",
    "layers",
    "layer_block_bytes",
    "shards",
    "lookahead",
    "blocks_per_object",
    "prefix_cacheable",
)

_MODELS = files("hybridkv.specs") / "models"


def catalogue() -> list[str]:
    """Return the names of the built-in layouts, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _MODELS.iterdir())


def find_layout(name_or_path: str) -> Layout:
    """Return the built-in layout of that name, or the one in that TOML file.

    Raises:
        ConfigError: neither exists, or the file is not a layout; the message names field and remedy.
    """
    if name_or_path in catalogue():
        return parse_layout((_MODELS / f"{name_or_path}.toml").read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"model {name_or_path!r} is neither a layout file nor built in"
            f"{nearest(name_or_path, catalogue())}; built in: {', '.join(catalogue())}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path}: cannot be read as text: {error}") from None
    return parse_layout(text, name_or_path)


def parse_layout(text: str, where: str) -> Layout:
    """Return the layout that a TOML text describes.

    Args:
        text: the file's content.
        where: names the file in messages.

    Raises:
        ConfigError: the text is not a layout.
    """
    try:
        raw = tomllib.loads(text)
        _known(raw, _LAYOUT_FIELDS, where)
        groups = raw.get("groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise ConfigError(f"{where}: no [[groups]]; give one table a cache group")
        for field in ("name", "source"):
            if not isinstance(raw.get(field, ""), str):
                raise ConfigError(f"{where}: {field} is {raw[field]!r}; give a text")
        return Layout(
            name=raw.get("name", Path(where).stem),
            groups=tuple(_group(group, f"{where}: groups[{idx}]") for idx, group in enumerate(groups)),
            hash_unit=raw.get("hash_unit", 0),
            source=raw.get("source", ""),
        )
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except SpecError as error:
        raise ConfigError(f"{where}: {error}") from None


def _group(raw: Mapping[str, object], where: str) -> CacheGroup:
    kind = raw.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: kind is {kind!r}; give the name of a kind of attention")
    spec_fields = [field.name for field in fields(spec_class(kind))]
    _known(raw, ("kind", *_GROUP_FIELDS, *_HEADS, *spec_fields), where)
    if "block_size" not in raw:
        raise ConfigError(f"{where}: block_size is missing")
    values = {field: raw[field] for field in _GROUP_FIELDS if field in raw}
    name = values.setdefault("name", kind)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name is {name!r}; give a text")
    if given := [field for field in _HEADS if field in raw]:
        if len(given) < len(_HEADS) or "layer_block_bytes" in raw or "shards" in raw:
            raise ConfigError(
                f"{where}: give all of {', '.join(_HEADS)}, or else layer_block_bytes and shards, not a mix"
            )
        heads, head_dim, dtype_bytes = (_count(raw, field, where) for field in _HEADS)
        block_size = _count(raw, "block_size", where)
        values["layer_block_bytes"] = 2 * heads * head_dim * dtype_bytes * block_size
        values["shards"] = heads
    return CacheGroup(spec=_spec(kind, raw, spec_fields, where), **values)  # type: ignore[arg-type]


def _spec(kind: str, raw: Mapping[str, object], spec_fields: list[str], where: str) -> CacheSpec:
    try:
        return spec_class(kind)(**{field: raw[field] for field in spec_fields if field in raw})  # type: ignore[arg-type]
    except TypeError:
        missing = [field for field in spec_fields if field not in raw and field != "extra"]
        raise ConfigError(f"{where}: {', '.join(missing)} is missing for kind {kind!r}") from None


def _count(raw: Mapping[str, object], field: str, where: str) -> int:
    value = raw[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {field} is {value!r}; give an integer >= 1")
    return value


def _known(raw: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for field in raw:
        if field not in known:
            raise ConfigError(f"{where}: field {field!r} is unknown{nearest(field, known)}")
