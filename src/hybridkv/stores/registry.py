"""Opening a store by its URI, such as ``memory://?capacity=2GiB``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote, urlsplit

from hybridkv.errors import ConfigError
from hybridkv.stores.base import Store
from hybridkv.suggest import nearest
from hybridkv.units import parse_bytes

ENTRY_POINT_GROUP = "hybridkv.stores"
"""Other packages add a store by an entry point of this group: the scheme names a ``StoreFactory``."""

_BUILTIN = {
    "local": "hybridkv.stores.local.store:open_local",
    "memory": "hybridkv.stores.memory:open_memory",
    "mooncake": "hybridkv.stores.mooncake.store:open_mooncake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUri:
    """A store's URI in parts: ``scheme://authority/path?setting=value&...``.

    Attributes:
        scheme: names the kind of store, in lower case.
        authority: host and port, or empty.
        path: begins with a slash or is empty; percent-decoded.
        query: the settings; no value is empty.
    """

    scheme: str
    authority: str = ""
    path: str = ""
    query: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def check_settings(self, *known: str) -> None:
        """Refuse settings that the store does not know.

        Raises:
            ConfigError: a setting of the query is not among ``known``.
        """
        for setting in self.query:
            if setting not in known:
                raise ConfigError(
                    f"{self.scheme} store: unknown setting {setting!r}{nearest(setting, known)} "
                    f"(known: {', '.join(known) or 'none'})"
                )

    def num_bytes(self, setting: str) -> int | None:
        """Return a setting that is a size, in bytes, or ``None`` where it is not given.

        Raises:
            ConfigError: the value is no size; see ``parse_bytes``.
        """
        if setting not in self.query:
            return None
        try:
            return parse_bytes(self.query[setting])
        except ConfigError as error:
            raise ConfigError(f"{self.scheme} store: {setting}: {error}") from error


StoreFactory = Callable[[StoreUri], Store]
"""Opens one kind of store; checks the settings and raises ``ConfigError``."""


def parse_store_uri(uri: str) -> StoreUri:
    """Return the parts of a store URI; whether its scheme and settings are known is not checked.

    Raises:
        ConfigError: the URI is malformed, has a fragment, or gives a setting twice or without a value.

    Example:
        >>> parse_store_uri("memory://?capacity=2GiB").query["capacity"]
        '2GiB'
    """
    try:
        parts = urlsplit(uri)
        settings = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise ConfigError(f"malformed store URI: {error}") from error
    if not parts.scheme or not uri[len(parts.scheme) :].startswith("://"):
        raise ConfigError("a store URI begins with its scheme and ://, as in memory://?capacity=2GiB")
    if parts.fragment:
        raise ConfigError(f"a store URI has no fragment: remove #{parts.fragment}")
    query: dict[str, str] = {}
    for setting, value in settings:
        if not value:
            raise ConfigError(f"{parts.scheme} store: setting {setting!r} has no value")
        if setting in query:
            raise ConfigError(f"{parts.scheme} store: setting {setting!r} is given twice")
        query[setting] = value
    return StoreUri(
        scheme=parts.scheme,
        authority=parts.netloc,
        path=unquote(parts.path),
        query=MappingProxyType(query),
    )


def open_store(uri: str) -> Store:
    """Open the store that a URI names; a built-in scheme comes before another package's of the same name.

    Args:
        uri: as in ``memory://?capacity=2GiB``; see each store's module for its settings.

    Raises:
        ConfigError: the URI is malformed, its scheme is unknown or a setting is wrong.
        StoreError: the store cannot be opened.

    Example:
        >>> open_store("memory://?capacity=2GiB").contains(["some-key"])
        [False]
    """
    parsed = parse_store_uri(uri)
    known = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for scheme, factory in _BUILTIN.items():
        known[scheme] = EntryPoint(name=scheme, value=factory, group=ENTRY_POINT_GROUP)
    if parsed.scheme not in known:
        raise ConfigError(
            f"unknown store {parsed.scheme!r}{nearest(parsed.scheme, known)} "
            f"(known: {', '.join(sorted(known))})"
        )
    open_by_uri: StoreFactory = known[parsed.scheme].load()
    return open_by_uri(parsed)
