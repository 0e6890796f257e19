"""What a ``mooncake://`` URI or Mooncake's own configuration file sets."""

import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv.errors import ConfigError
from hybridkv.stores.mooncake.values import TRAILER_BYTES
from hybridkv.suggest import nearest
from hybridkv.units import parse_bytes

if TYPE_CHECKING:
    from hybridkv.stores.registry import StoreUri

CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
MASTER_PORT = 50051
HTTP_PORT = 9003
MIN_SEGMENT_BYTES = 16 * 2**20
"""Mooncake refuses a smaller segment."""
MAX_TIMEOUT_S = 50.0
"""Mooncake gives up a transfer after 60 s; a store has to be quicker."""
PROTOCOLS = ("tcp", "rdma")

_KNOWN = (
    "checksum",
    "device",
    "hostname",
    "http",
    "metadata",
    "pack",
    "protocol",
    "replicas",
    "segment",
    "staging",
    "tenant",
    "timeout",
)
_FILE_FIELDS = {
    "master_server_address": "",
    "global_segment_size": "segment",
    "protocol": "protocol",
    "device_name": "device",
    "metadata_server": "metadata",
    "local_hostname": "hostname",
}
"""Fields of Mooncake's configuration file, and the settings of the URI that they are."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """How to reach a Mooncake cluster and how to move objects.

    Attributes:
        master: ``host:port`` of the master's RPC, or the address of a store of leaders for a highly available
            one (``etcd://...``).
        protocol: ``tcp`` or ``rdma``.
        device: RDMA devices, comma-separated; empty with ``tcp``.
        metadata: metadata server of the transfer engine.
        hostname: under which others reach this client; ``None``: the address it reaches the master from.
        segment_bytes: memory that this client contributes to the cluster; 0: none.
        tenant: passed on; the master must have tenants enabled, or it is ignored.
        replicas: copies of each object, at most one a storage node.
        http: ``host:port`` of the master's HTTP interface, for what lists and counts objects.
        timeout_s: longest wait for one call of the client.
        pack_bytes: an object whose segments are smaller on average is packed into one piece.
        staging_bytes: memory for packed objects.
        is_checksummed: whether payloads are hashed and verified. The same on all clients.
    """

    master: str
    protocol: str = "tcp"
    device: str = ""
    metadata: str = "P2PHANDSHAKE"
    hostname: str | None = None
    segment_bytes: int = 0
    tenant: str = "default"
    replicas: int = 1
    http: str = ""
    timeout_s: float = 10.0
    pack_bytes: int = 256 * 2**10
    staging_bytes: int = 64 * 2**20
    is_checksummed: bool = True

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                f"mooncake store: protocol {self.protocol!r}{nearest(self.protocol, PROTOCOLS)} "
                f"(known: {', '.join(PROTOCOLS)})"
            )
        if self.protocol == "rdma" and not self.device:
            raise ConfigError("mooncake store: protocol rdma needs its devices: device=mlx5_0,mlx5_1")
        if 0 < self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError("mooncake store: a segment is at least 16MiB; leave it out to contribute none")
        if self.staging_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError("mooncake store: staging is at least 16MiB")
        if self.replicas < 1:
            raise ConfigError(f"mooncake store: replicas is {self.replicas}; give an integer >= 1")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"mooncake store: timeout is {self.timeout_s}; give seconds > 0, at most {MAX_TIMEOUT_S:g}"
            )

    @property
    def has_leaders(self) -> bool:
        """Whether the master is found through a store of leaders instead of by its address."""
        return "://" in self.master

    @property
    def trailer_bytes(self) -> int:
        """Bytes after each payload."""
        return TRAILER_BYTES if self.is_checksummed else 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the master's RPC."""
        return split_address(self.master)

    def local_hostname(self) -> str:
        """Return the name under which others reach this client.

        Raises:
            OSError: there is no way to the master's host.
        """
        if self.hostname is not None or self.has_leaders:
            return self.hostname or socket.gethostname()
        family, _, _, _, address = socket.getaddrinfo(*self.address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(
            family, socket.SOCK_DGRAM
        ) as probe:  # no packet is sent: only the route is asked for
            probe.connect(address)
            return str(probe.getsockname()[0])


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, where IPv6 addresses stand in brackets.

    Raises:
        ConfigError: the text is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"mooncake store: {text!r} is no host:port, such as 10.0.0.1:{MASTER_PORT}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def settings_of(uri: "StoreUri", environment: Mapping[str, str] = os.environ) -> MooncakeSettings:
    """Return what ``mooncake://host:port?...`` says; without a host, what Mooncake's own file says.

    The file is the one that MOONCAKE_CONFIG_PATH names; settings of the URI come before its fields.

    Raises:
        ConfigError: URI or file makes no sense.
    """
    uri.check_settings(*_KNOWN)
    if uri.path.strip("/"):
        raise ConfigError("a mooncake store has no path: write mooncake://host:port?segment=4GiB")
    if uri.authority:
        given: dict[str, str] = {}
        master = uri.authority if ":" in uri.authority else f"{uri.authority}:{MASTER_PORT}"
    else:
        given = _from_file(environment)
        master = given.pop("")
    return _settings(_Texts({**given, **uri.query}), master)


def _settings(texts: "_Texts", master: str) -> MooncakeSettings:
    http = texts.get("http", str(HTTP_PORT))
    if ":" not in http and "://" not in master:
        http = f"{master.rpartition(':')[0]}:{http}"
    found = MooncakeSettings(
        master=master,
        protocol=texts.get("protocol", "tcp"),
        device=texts.get("device", ""),
        metadata=texts.get("metadata", "P2PHANDSHAKE"),
        hostname=texts.get("hostname", "") or None,
        segment_bytes=texts.num_bytes("segment", 0),
        tenant=texts.get("tenant", "default"),
        replicas=texts.whole("replicas", 1),
        http=http,
        timeout_s=texts.number("timeout", 10.0),
        pack_bytes=texts.num_bytes("pack", 256 * 2**10),
        staging_bytes=texts.num_bytes("staging", 64 * 2**20),
        is_checksummed=texts.switch("checksum", default=True),
    )
    for address in [found.http] if found.has_leaders else [found.master, found.http]:
        split_address(address)
    return found


@dataclass(frozen=True, slots=True)
class _Texts:
    """Settings as texts, read by kind."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: str) -> str:
        return self.texts.get(name, default)

    def num_bytes(self, name: str, default: int) -> int:
        text = self.texts.get(name, str(default))
        if text == "0":
            return 0
        try:
            return parse_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"mooncake store: {name}: {error}") from error

    def number(self, name: str, default: float) -> float:
        text = self.texts.get(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"mooncake store: {name} is {text!r}; give a number") from None

    def whole(self, name: str, default: int) -> int:
        number = self.number(name, default)
        if not number.is_integer():
            raise ConfigError(f"mooncake store: {name} is {number}; give a whole number")
        return int(number)

    def switch(self, name: str, *, default: bool) -> bool:
        text = self.texts.get(name, "on" if default else "off")
        if text not in {"on", "off"}:
            raise ConfigError(f"mooncake store: {name} is {text!r}; give on or off")
        return text == "on"


def _from_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Mooncake's configuration file; the master under the empty name."""
    place = environment.get(CONFIG_PATH)
    if not place:
        raise ConfigError(
            f"a mooncake store has a master: write mooncake://host:{MASTER_PORT}, or set {CONFIG_PATH}"
        )
    fields = _read_file(f"{CONFIG_PATH}={place}", Path(place))
    unused = sorted(fields.keys() - _FILE_FIELDS)
    if unused:
        _log.info("%s=%s: hybridkv does not use %s", CONFIG_PATH, place, ", ".join(unused))
    found = {_FILE_FIELDS[name]: str(value) for name, value in fields.items() if name in _FILE_FIELDS}
    found = {setting: text for setting, text in found.items() if text}
    if "segment" in found:  # Mooncake writes 4GB, or 4gb, and means 4 GiB
        found["segment"] = re.sub("(?i)([gm])b$", lambda unit: f"{unit[1].upper()}iB", found["segment"])
    return found


def _read_file(what: str, path: Path) -> dict[str, str | int]:
    """Return the fields of Mooncake's configuration file that hybridkv can use, and all others."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: is no JSON: {error}") from None
    if not isinstance(raw, dict) or not raw.get("master_server_address"):
        raise ConfigError(f"{what}: has no master_server_address")
    for name in raw.keys() & _FILE_FIELDS.keys():
        if not isinstance(raw[name], str) and type(raw[name]) is not int:
            raise ConfigError(f"{what}: {name} is {raw[name]!r}, neither a text nor a whole number")
    return raw
