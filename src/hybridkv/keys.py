"""Keys, block hashes, namespaces and manifests; any change of bytes under a key is a new scheme version.

A key reads ``hkv1/<namespace fingerprint>/<spec group>/<rank>/<block hash>``. The fingerprint digests
everything that must agree for bytes to be exchangeable; the block hash is chained, so it names the block
and its whole prefix.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import KeySchemeError
from hybridkv.specs.layout import Layout
from hybridkv.suggest import nearest

SCHEME = "hkv1"
PAYLOAD_VERSION = 1
"""Version of the bytes under a key: how an object's layers are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything beside the layout that must agree for bytes to be exchangeable.

    Attributes:
        model_version: a digest of the weights and the effective configuration, or a version that the
            user vouches for; never a path.
        weights_epoch: raised when the weights change under a running engine.
        draft_model: version of the draft model of speculative decoding; empty without one.
        kv_dtype: element type of the KV cache, such as ``bfloat16``.
        state_dtypes: element types of recurrent states; empty without any.
        quantization: scheme and scales of the KV cache; empty without one.
        kernel_layout: how the engine's kernels lay a block out in memory.
        hash_algorithm: algorithm of the block hashes.
        hash_root: hex of what the first block hash is chained to.
    """

    model_version: str
    weights_epoch: int = 0
    draft_model: str = ""
    kv_dtype: str = ""
    state_dtypes: tuple[str, ...] = ()
    quantization: str = ""
    kernel_layout: str = ""
    hash_algorithm: str = "sha256"
    hash_root: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What a manifest says of one spec group.

    Attributes:
        kind: of attention.
        spec: the kind's sizes.
        members: layers x bytes of a layer's block, one for each cache group, in the order of the payload.
        lookahead: tokens.
        blocks_per_object: k.
        object_bytes: payload of one object on one rank.
        num_ranks: rank namespaces.
    """

    kind: str
    spec: str
    members: str
    lookahead: int
    blocks_per_object: int
    object_bytes: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The readable form of a namespace, stored beside its data."""

    scheme: str
    payload_version: int
    hash_unit: int
    namespace: Namespace
    groups: tuple[GroupFacts, ...]

    @classmethod
    def of(cls, namespace: Namespace, layout: Layout) -> "Manifest":
        """Return the manifest of a layout in a namespace."""
        return cls(
            scheme=SCHEME,
            payload_version=PAYLOAD_VERSION,
            hash_unit=layout.hash_unit,
            namespace=namespace,
            groups=tuple(
                GroupFacts(
                    kind=group.spec.kind,
                    spec=" ".join(f"{f.name}={getattr(group.spec, f.name)}" for f in fields(group.spec)),
                    members=" ".join(
                        f"{member.layers}x{member.layer_block_bytes}"
                        for member in (layout.groups[idx] for idx in group.cache_groups)
                    ),
                    lookahead=group.lookahead,
                    blocks_per_object=group.blocks_per_object,
                    object_bytes=group.object_bytes,
                    num_ranks=group.num_ranks,
                )
                for group in layout.spec_groups
            ),
        )

    def to_json(self) -> str:
        """Return the canonical text: sorted fields, one line.

        Raises:
            KeySchemeError: a field is no valid Unicode.
        """
        return _canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest strictly: unknown, missing or mistyped fields are refused.

        Raises:
            KeySchemeError: the text is not a manifest; the message names the field.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise KeySchemeError(f"manifest is not JSON: {error}") from None
        whole = _strict(cls, raw, "manifest")
        namespace = _strict(Namespace, whole["namespace"], "namespace")
        state_dtypes = _listed(namespace["state_dtypes"], "namespace.state_dtypes")
        if not all(isinstance(dtype, str) for dtype in state_dtypes):
            raise KeySchemeError("namespace.state_dtypes holds something else than texts")
        namespace["state_dtypes"] = tuple(state_dtypes)
        groups = [
            _strict(GroupFacts, group, f"groups[{idx}]")
            for idx, group in enumerate(_listed(whole["groups"], "groups"))
        ]
        whole["namespace"] = Namespace(**namespace)  # type: ignore[arg-type]
        whole["groups"] = tuple(GroupFacts(**group) for group in groups)  # type: ignore[arg-type]
        manifest = cls(**whole)  # type: ignore[arg-type]
        if (manifest.scheme, manifest.payload_version) != (SCHEME, PAYLOAD_VERSION):
            raise KeySchemeError(
                f"manifest.scheme is {manifest.scheme!r} with payload version {manifest.payload_version}; "
                f"this version reads {SCHEME!r} with {PAYLOAD_VERSION}"
            )
        return manifest

    @property
    def fingerprint(self) -> str:
        """32 hex digits that differ whenever any field differs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def differences(self, other: "Manifest") -> list[str]:
        """Return one line a differing field: ``field: this value != other value``."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return [
            f"{name}: {mine.get(name, 'absent')!r} != {theirs.get(name, 'absent')!r}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


def _flat(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else str(name), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{idx}]", part) for idx, part in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for sub, part in parts for name, leaf in _flat(part, sub).items()}


def _canonical(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise KeySchemeError("names and versions must be valid Unicode, without lone surrogates") from None
    return text


def _listed(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise KeySchemeError(f"{where} is {type(value).__name__}, not a list")
    return value


def _strict(cls: type, raw: object, where: str) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise KeySchemeError(f"{where} is {type(raw).__name__}, not an object")
    known = {field.name: field.type for field in fields(cls)}
    for name in raw:
        if name not in known:
            raise KeySchemeError(f"{where}.{name} is unknown{nearest(name, known)}")
    for name, kind in known.items():
        if name not in raw:
            raise KeySchemeError(f"{where}.{name} is missing")
        if kind in (int, str) and type(raw[name]) is not kind:
            raise KeySchemeError(f"{where}.{name} is {raw[name]!r}, not {kind.__name__}")
        if kind is int and raw[name] < 0:
            raise KeySchemeError(f"{where}.{name} is {raw[name]}; no number of a manifest is below 0")
    return dict(raw)


def prefix(fingerprint: str, spec_group: int, rank: int) -> str:
    """Return what the keys of a spec group and rank namespace begin with."""
    return f"{SCHEME}/{fingerprint}/{spec_group}/{rank}/"


def texts(prefix: str, digests: bytes, count: int) -> list[str]:
    """Return the keys of ``count`` objects whose block hashes are laid end to end."""
    if not count:
        return []
    text = digests.hex()
    width = len(text) // count
    return [prefix + text[i : i + width] for i in range(0, len(text), width)]


class KeyScheme:
    """Makes the keys of one namespace and layout, in bulk.

    Args:
        namespace: what beside the layout must agree.
        layout: what is planned with these keys.
        digest_bytes: length of one block hash.

    Attributes:
        layout: as given.
        digest_bytes: as given.
        manifest: of namespace and layout; its fingerprint is part of every key.
    """

    def __init__(self, namespace: Namespace, layout: Layout, *, digest_bytes: int) -> None:
        self.layout = layout
        self.manifest = Manifest.of(namespace, layout)
        self.digest_bytes = digest_bytes
        self._object_units = [group.object_size // layout.hash_unit for group in layout.spec_groups]
        self._prefixes = [
            [prefix(self.manifest.fingerprint, group.index, rank) for rank in range(group.num_ranks)]
            for group in layout.spec_groups
        ]

    def at_epoch(self, weights_epoch: int) -> "KeyScheme":
        """Return the scheme of the same namespace with other weights; keys of the two never meet."""
        namespace = replace(self.manifest.namespace, weights_epoch=weights_epoch)
        return KeyScheme(namespace, self.layout, digest_bytes=self.digest_bytes)

    def keys(self, spec_group: int, rank: int, objects: range | NDArray[np.int64], blob: bytes) -> list[str]:
        """Return the keys of some objects of a prompt.

        Args:
            spec_group: index of the spec group.
            rank: rank namespace.
            objects: object indices; the last hash unit of each lies inside the blob.
            blob: the prompt's block hashes, ``digest_bytes`` a hash unit.

        Raises:
            KeySchemeError: an object reaches past the blob, or the blob ends inside a block hash.
        """
        return self.keys_of(spec_group, rank, self.digests(spec_group, objects, blob))

    def keys_of(self, spec_group: int, rank: int, digests: bytes) -> list[str]:
        """Return the keys of objects whose block hashes are laid end to end, as ``digests`` gives them."""
        return texts(self._prefixes[spec_group][rank], digests, len(digests) // self.digest_bytes)

    def digests(self, spec_group: int, objects: range | NDArray[np.int64], blob: bytes) -> bytes:
        """Return the block hashes that name some objects of a prompt, laid end to end.

        Args:
            spec_group: index of the spec group.
            objects: object indices, as in ``keys``.
            blob: the prompt's block hashes.

        Raises:
            KeySchemeError: as in ``keys``.
        """
        units = self._object_units[spec_group]
        if not len(objects):
            return b""
        if len(blob) % self.digest_bytes:
            raise KeySchemeError(
                f"{len(blob)} bytes are no whole number of block hashes of {self.digest_bytes}"
            )
        if isinstance(objects, range):
            objects = np.arange(objects.start, objects.stop, objects.step, dtype=np.int64)
        digests = np.frombuffer(blob, dtype=np.uint8).reshape(-1, self.digest_bytes)
        if int(objects.max()) * units + units > len(digests) or int(objects.min()) < 0:
            raise KeySchemeError(
                f"object {int(objects.max())} of spec group {spec_group} reaches past the prompt's "
                f"{len(digests)} block hashes; only complete objects have a key"
            )
        chosen: bytes = digests[objects * units + units - 1].tobytes()
        return chosen


class KeyParts(NamedTuple):
    """What the text of a key shows."""

    fingerprint: str
    spec_group: int
    rank: int
    block_hash: str


def key_parts(key: str) -> KeyParts:
    """Return what a key shows.

    Raises:
        KeySchemeError: the key is of another scheme.

    Example:
        >>> key_parts("hkv1/0f3a/1/0/9bc4").spec_group
        1
    """
    parts = key.split("/")
    if len(parts) != 5 or parts[0] != SCHEME or not parts[2].isdecimal() or not parts[3].isdecimal():
        raise KeySchemeError(f"key {key!r} is not of scheme {SCHEME}")
    return KeyParts(parts[1], int(parts[2]), int(parts[3]), parts[4])


def without_rank(key: str) -> str:
    """Return what the keys of all ranks of an object have in common; a key of another scheme as it is.

    Example:
        >>> without_rank("hkv1/0f3a/1/0/9bc4")
        'hkv1/0f3a/1/9bc4'
    """
    try:
        parts = key_parts(key)
    except KeySchemeError:
        return key
    return f"{SCHEME}/{parts.fingerprint}/{parts.spec_group}/{parts.block_hash}"


def spec_group_of(key: str) -> int:
    """Return the spec group that a key names.

    Raises:
        KeySchemeError: the key is of another scheme.
    """
    return key_parts(key).spec_group


class BlockHasher:
    """Chained block hashes for callers that bring token ids.

    ``h[i] = sha256(h[i-1] || tokens of unit i)``; the root digests the tenant's salt and the LoRA name in
    separate domains, so a LoRA that is named like a salt shares nothing with it.

    Args:
        hash_unit: tokens per hash, >= 1.
        salt: the tenant's salt; prompts of different salts share no hash.
        lora: name of the LoRA adapter; empty for the base model.

    Raises:
        KeySchemeError: the hash unit is below 1, or salt or LoRA name is no valid Unicode.

    Example:
        >>> hasher = BlockHasher(hash_unit=4)
        >>> blob = hasher.hash_tokens([1, 2, 3, 4, 5])
        >>> len(blob)
        32
        >>> blob == hasher.hash_tokens([1, 2, 3, 4, 9, 9, 9])
        True
    """

    digest_bytes = 32

    def __init__(self, *, hash_unit: int, salt: str = "", lora: str = "") -> None:
        if hash_unit < 1:
            raise KeySchemeError(f"hash_unit is {hash_unit}; give an integer >= 1")
        self._hash_unit = hash_unit
        domains = _canonical([["root", SCHEME], ["salt", salt], ["lora", lora]])
        self.root = hashlib.sha256(domains.encode()).digest()

    def hash_tokens(self, tokens: Sequence[int]) -> bytes:
        """Return the hashes of the prompt's complete hash units, laid end to end.

        Args:
            tokens: token ids, each in [0, 2**32).

        Raises:
            KeySchemeError: a token id is out of range.
        """
        try:
            raw = np.asarray(tokens)
        except ValueError:  # lists of unequal length
            raw = np.zeros((1, 1))
        is_flat = raw.ndim == 1 and (raw.dtype.kind in "iu" or not raw.size)
        if not is_flat or (raw.size and (int(raw.min()) < 0 or int(raw.max()) >= 1 << 32)):
            raise KeySchemeError("token ids must be a flat list of integers in [0, 2**32)")
        data = memoryview(raw.astype("<u4").tobytes())
        step, parent, hashes = 4 * self._hash_unit, self.root, []
        for start in range(0, len(data) - step + 1, step):
            parent = hashlib.sha256(parent + data[start : start + step]).digest()
            hashes.append(parent)
        return b"".join(hashes)


def vllm_mooncake(
    *,
    model: str,
    group: int,
    block_hash: bytes,
    tp_rank: int = 0,
    pcp_rank: int = 0,
    dcp_rank: int = 0,
    pp_rank: int = 0,
    cache_prefix: str = "",
) -> str:
    """Return the key of vLLM's in-tree Mooncake connector (0.32), for tools that inspect such stores.

    Example:
        >>> vllm_mooncake(model="test-model", group=1, block_hash=b"h3")
        'test-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@6833'
    """
    text = (
        f"{model}@tp_rank:{tp_rank}@pcp{pcp_rank}@dcp{dcp_rank}@pp_rank:{pp_rank}"
        f"@group:{group}@{block_hash.hex()}"
    )
    return f"{cache_prefix}@{text}" if cache_prefix else text
