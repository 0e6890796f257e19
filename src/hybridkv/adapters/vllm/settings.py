"""What ``kv_connector_extra_config`` and a request's ``kv_transfer_params`` may say.

Every key is a field of one dataclass, with unit and meaning beside it: ``describe`` lists them for the docs.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from hybridkv.errors import ConfigError
from hybridkv.plan.boundaries import Retention
from hybridkv.service.settings import SchedulerSettings
from hybridkv.suggest import nearest
from hybridkv.transfer.guard import GuardSettings
from hybridkv.transfer.moves import MoverSettings
from hybridkv.units import parse_bytes

EXTRA = "kv_connector_extra_config"
PARAMS = "kv_transfer_params"
REQUEST_KEY = "hybridkv"
"""The key of ``kv_transfer_params`` whose value is a request's own settings."""

SLOT_UNIT = 64
"""Slots are multiples of this, bytes."""

T = TypeVar("T")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError("give a text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("give true or false")
    return value


def _count(least: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"give an integer >= {least}")
        return value

    return parse


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError("give a number of seconds > 0")
    return float(value)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError("give a number in (0, 1]")
    return float(value)


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError("give a size such as '32MiB'")
    return parse_bytes(str(value))


def _retention(value: object) -> Retention:
    if value == "all":
        return "all"
    try:
        return _count(0)(value)
    except ConfigError:
        raise ConfigError("give 'all', 0 or a number of tokens") from None


def _setting(
    parse: Callable[[object], T],
    *,
    meaning: str,
    default: Any = MISSING,  # noqa: ANN401 - as in dataclasses.field
    unit: str = "",
) -> Any:  # noqa: ANN401 - the annotation beside the field gives the type
    return field(default=default, metadata={"parse": parse, "meaning": meaning, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What ``kv_connector_extra_config`` holds, checked."""

    store: str = _setting(_text, meaning="URI of the store, such as local:///dev/shm/hybridkv?capacity=64GiB")
    model_version: str | None = _setting(
        _text,
        default=None,
        meaning="names the weights, vouched for by you; without it a digest of the files does",
    )
    retention: Retention = _setting(  # noqa: RUF009 - a field
        _retention,
        default="all",
        unit="tokens",
        meaning="which boundaries the store keeps: all, every n tokens, or 0 = the ends of prompts only",
    )
    lookup_async: bool = _setting(
        _flag, default=True, meaning="whether the scheduler goes on while the store is asked"
    )
    lookup_timeout_s: float = _setting(
        _seconds, default=1.0, unit="s", meaning="longest lookup; then the proven part is the hit"
    )
    answer_s: float = _setting(
        _seconds, default=10.0, unit="s", meaning="how long an answer is good for a request that still waits"
    )
    load_async: bool = _setting(
        _flag, default=True, meaning="whether others compute while a request loads; false is refused"
    )
    save_decode_cache: bool = _setting(
        _flag, default=False, meaning="whether generated tokens are saved, too"
    )
    least_load_tokens: int = _setting(
        _count(1), default=1, unit="tokens", meaning="a hit that adds fewer is not loaded"
    )
    least_save_tokens: int = _setting(
        _count(1), default=1, unit="tokens", meaning="shorter prompts are not saved"
    )
    pinned_share: float = _setting(
        _share, default=0.25, meaning="part of the engine's blocks that loads and saves may hold"
    )
    load_tries: int = _setting(
        _count(1), default=3, meaning="failed loads of a request after which it computes instead"
    )
    save_tries: int = _setting(
        _count(1), default=3, meaning="failed saves of an object after which a request leaves it"
    )
    known_s: float = _setting(
        _seconds, default=300.0, unit="s", meaning="how long a stored object is trusted to be stored still"
    )
    store_timeout_s: float = _setting(
        _seconds, default=10.0, unit="s", meaning="longest put or get of one batch"
    )
    slot_bytes: int = _setting(
        _size,
        default=32 << 20,
        unit="bytes",
        meaning="bytes of one put or get at most; one object always fits",
    )
    num_slots: int = _setting(
        _count(1), default=8, meaning="batches in flight each way; a worker stages 2 x num_slots x slot_bytes"
    )
    write_bytes_per_s: int | None = _setting(
        _size, default=None, unit="bytes/s", meaning="most that one worker saves on average; none = no limit"
    )

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read the settings strictly.

        Raises:
            ConfigError: a key is unknown, missing or has a wrong value; the message names it and the remedy.
        """
        known = {one.name: one for one in fields(cls)}
        for key in extra:
            if key not in known:
                raise ConfigError(f"{EXTRA}: unknown key {key!r}{nearest(key, known)}")
        values = {}
        for name, one in known.items():
            if name in extra and not (extra[name] is None and one.default is None):
                try:
                    values[name] = one.metadata["parse"](extra[name])
                except ConfigError as error:
                    raise ConfigError(f"{EXTRA}: {name} is {extra[name]!r}; {error}") from None
            elif name not in extra and one.default is MISSING:
                raise ConfigError(f"{EXTRA}: {name} is missing: {one.metadata['meaning']}")
        settings = cls(**values)
        if not settings.load_async:
            raise ConfigError(
                f"{EXTRA}: load_async is false; vLLM cannot recompute what a synchronous load has failed to "
                "bring on a model with several cache groups, so all loads are asynchronous: remove it"
            )
        return settings

    def scheduler(self, num_blocks: int) -> SchedulerSettings:
        """Return the scheduler side's settings for an engine of so many blocks."""
        return SchedulerSettings(
            retention=self.retention,
            lookup_timeout_s=self.lookup_timeout_s,
            answer_s=self.answer_s,
            least_load_tokens=self.least_load_tokens,
            least_save_tokens=self.least_save_tokens,
            load_tries=self.load_tries,
            save_tries=self.save_tries,
            pinned_blocks=int(num_blocks * self.pinned_share),
            known_s=self.known_s,
        )

    def mover(self, largest_object: int) -> MoverSettings:
        """Return the settings of a worker's transfers, with slots that hold its largest object, bytes."""
        return MoverSettings(
            slot_bytes=-(-max(self.slot_bytes, largest_object) // SLOT_UNIT) * SLOT_UNIT,
            num_slots=self.num_slots,
            write_bytes_per_s=self.write_bytes_per_s,
            guard=GuardSettings(timeout_s=self.store_timeout_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One key, as documentation shows it; ``default`` is empty where the key must be given."""

    name: str
    default: str
    unit: str
    meaning: str


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe() -> list[SettingRow]:
    """Return the keys of ``kv_connector_extra_config`` in order."""
    return [
        SettingRow(
            name=one.name,
            default="" if one.default is MISSING else _shown(one.default),
            unit=one.metadata["unit"],
            meaning=one.metadata["meaning"],
        )
        for one in fields(ConnectorSettings)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """What one request asks for: ``{"hybridkv": {"save": false, "load": false}}``.

    Attributes:
        save: whether its blocks may be saved.
        load: whether blocks may be loaded for it.
    """

    save: bool = True
    load: bool = True

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> "RequestSettings":
        """Read a request's ``kv_transfer_params`` strictly; other connectors' keys are left alone.

        Raises:
            ConfigError: the value of ``hybridkv`` holds an unknown key or no flags.
        """
        given = (params or {}).get(REQUEST_KEY)
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{PARAMS}: {REQUEST_KEY} is {given!r}; give an object such as {{'save': false}}"
            )
        known = [one.name for one in fields(cls)]
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"{PARAMS}: {REQUEST_KEY}: unknown key {key!r}{nearest(str(key), known)}")
            if not isinstance(value, bool):
                raise ConfigError(f"{PARAMS}: {REQUEST_KEY}: {key} is {value!r}; give true or false")
        return cls(**given)
