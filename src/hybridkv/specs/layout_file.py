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
from dataclasses import MISSING, Field, fields
from importlib.resources import files
from pathlib import Path

from hybridkv.errors import ConfigError, SpecError
from hybridkv.specs.base import require_int
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.table import spec_class
from hybridkv.suggest import nearest

_LAYOUT_FIELDS = ("name", "source", "hash_unit", "groups")
_HEADS = ("kv_heads", "head_dim", "dtype_bytes")
_GROUP_FIELDS = tuple(field.name for field in fields(CacheGroup) if field.name != "spec")

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
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        raise ConfigError(
            f"model {name_or_path!r} is neither a layout file nor built in ({', '.join(catalogue())})"
            f"{nearest(name_or_path, catalogue())}"
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
        return _layout(tomllib.loads(text), Path(where).stem)
    except SpecError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # also TOMLDecodeError, and numbers of thousands of digits
        raise ConfigError(f"{where}: not TOML: {error}") from None


def _layout(raw: dict[str, object], stem: str) -> Layout:
    _known(raw, _LAYOUT_FIELDS, "layout")
    groups = raw.get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise SpecError("no [[groups]]; give one table a cache group")
    for field in ("name", "source"):
        if not isinstance(raw.get(field, ""), str):
            raise SpecError(f"{field} is {raw[field]!r}; give a text")
    return Layout(
        name=str(raw.get("name", stem)),
        groups=tuple(_group(group, f"groups[{idx}]") for idx, group in enumerate(groups)),
        hash_unit=raw.get("hash_unit", 0),  # type: ignore[arg-type]  # checked by Layout
        source=str(raw.get("source", "")),
    )


def _group(raw: Mapping[str, object], where: str) -> CacheGroup:
    kind, name = raw.get("kind"), raw.get("name", raw.get("kind"))
    for field, value in (("kind", kind), ("name", name)):
        if not isinstance(value, str):
            raise SpecError(f"{where}: {field} is {value!r}; give a text")
    try:
        spec_type = spec_class(str(kind))
        _known(raw, ("kind", *_GROUP_FIELDS, *_HEADS, *(field.name for field in fields(spec_type))), where)
        spec_values = {field.name: _given(raw, field, where) for field in fields(spec_type)}
        values = {"name": name, **{field: raw[field] for field in _GROUP_FIELDS if field in raw}}
        return CacheGroup(spec=spec_type(**spec_values), **{**values, **_sizes(raw, where)})  # type: ignore[arg-type]
    except SpecError as error:
        raise SpecError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None


def _given(raw: Mapping[str, object], field: Field[object], where: str) -> object:
    if field.name not in raw and field.default is MISSING:
        raise SpecError(f"{where}: {field.name} is missing for kind {raw['kind']!r}")
    return raw.get(field.name, field.default)


def _sizes(raw: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the bytes of a layer's block and its shards, from the KV heads where those are given."""
    if "layers" not in raw or ("layer_block_bytes" not in raw and not set(_HEADS) & raw.keys()):
        raise SpecError(f"{where}: give layers, and {', '.join(_HEADS)} or layer_block_bytes")
    if not set(_HEADS) & raw.keys():
        return {}
    if not set(_HEADS) <= raw.keys() or "layer_block_bytes" in raw or "shards" in raw:
        raise SpecError(
            f"{where}: give all of {', '.join(_HEADS)}, or layer_block_bytes and shards, not a mix"
        )
    product = 2
    for field in (*_HEADS, "block_size"):
        require_int(where, field, raw[field], 1)
        product *= int(str(raw[field]))
    return {"layer_block_bytes": product, "shards": raw["kv_heads"]}


def _known(raw: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for field in raw:
        if field not in known:
            raise SpecError(f"{where}: field {field!r} is unknown{nearest(field, known)}")
