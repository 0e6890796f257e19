"""``hybridkv store``: look into a store, remove from it, verify it; for any store that offers it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from hybridkv.cli_output import JsonFile, show, write_json
from hybridkv.errors import ConfigError, KeySchemeError
from hybridkv.keys import SCHEME, KeyParts, key_parts
from hybridkv.stores.base import ChecksItself, ListsObjects, ObjectInfo, ReportsStats, Store
from hybridkv.stores.registry import open_store
from hybridkv.units import format_bytes

store_app = typer.Typer(no_args_is_help=True, help="Look into a store, remove from it, verify it.")

BATCH_KEYS = 1000

Uri = Annotated[str, typer.Argument(help="The store, such as local:///dev/shm/kv.")]
Namespace = Annotated[
    str | None, typer.Option(metavar="FINGERPRINT", help="Only objects whose namespace begins with this.")
]
SpecGroup = Annotated[int | None, typer.Option(help="Only objects of this spec group.")]
Rank = Annotated[int | None, typer.Option(help="Only objects of this rank.")]
OlderThan = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Only objects stored longer ago than this.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which objects a command is about; ``None`` asks for nothing."""

    namespace: str | None
    spec_group: int | None
    rank: int | None
    older_than_s: float | None

    def selects(self, info: ObjectInfo) -> bool:
        """Tell whether an object has everything that is asked for; one that does not show it has not."""
        parts = _parts(info.key)
        if self.older_than_s is not None and (info.age_s is None or info.age_s <= self.older_than_s):
            return False
        asked = [self.namespace, self.spec_group, self.rank]
        if parts is None:
            return asked == [None] * 3
        return (
            parts.fingerprint.startswith(self.namespace or "")
            and self.spec_group in {None, parts.spec_group}
            and self.rank in {None, parts.rank}
        )

    @property
    def is_empty(self) -> bool:
        """Whether every object is selected."""
        return self == Filter(namespace=None, spec_group=None, rank=None, older_than_s=None)


def _parts(key: str) -> KeyParts | None:
    try:
        return key_parts(key)
    except KeySchemeError:
        return None


def _list(store: Store) -> Iterator[ObjectInfo]:
    if not isinstance(store, ListsObjects):
        raise ConfigError(f"a {type(store).__name__} does not list its objects")
    return store.list()


@store_app.command("stat")
def stat(uri: Uri, namespace: Namespace = None, json_file: JsonFile = None) -> None:
    """Show what a store holds, by namespace and spec group."""
    chosen = Filter(namespace=namespace, spec_group=None, rank=None, older_than_s=None)
    with closing(open_store(uri)) as store:
        if not isinstance(store, ReportsStats):
            raise ConfigError(f"a {type(store).__name__} does not count its objects")
        capacity_bytes = store.stats().capacity_bytes
        infos = list(filter(chosen.selects, _list(store)))
    objects, num_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for info in infos:
        parts = _parts(info.key)
        group = (parts.fingerprint, str(parts.spec_group)) if parts else (f"not {SCHEME}", "")
        objects[group] += 1
        num_bytes[group] += info.num_bytes
    table = Table("namespace", "spec group", "objects", "bytes")
    for group in sorted(objects):
        table.add_row(*group, str(objects[group]), format_bytes(num_bytes[group]))
    used_bytes = num_bytes.total()
    capacity = "no limit" if capacity_bytes is None else format_bytes(capacity_bytes)
    show(Group(f"{len(infos)} objects, {format_bytes(used_bytes)} of {capacity}", table), json_file)
    groups = [
        {"namespace": group[0], "spec_group": group[1], "objects": count, "bytes": num_bytes[group]}
        for group, count in sorted(objects.items())
    ]
    write_json(
        json_file,
        {
            "objects": len(infos),
            "used_bytes": used_bytes,
            "capacity_bytes": capacity_bytes,
            "groups": groups,
        },
    )


@store_app.command("ls")
def ls(
    uri: Uri,
    namespace: Namespace = None,
    spec_group: SpecGroup = None,
    rank: Rank = None,
    older_than: OlderThan = None,
    json_file: JsonFile = None,
) -> None:
    """List objects: bytes, age and key."""
    chosen = Filter(namespace=namespace, spec_group=spec_group, rank=rank, older_than_s=older_than)
    with closing(open_store(uri)) as store:
        infos = sorted(filter(chosen.selects, _list(store)), key=lambda info: info.key)
    if str(json_file) != "-":
        for info in infos:
            age = "-" if info.age_s is None else f"{info.age_s:.0f}s"
            typer.echo(f"{info.num_bytes:>12} {age:>10} {info.key}")
    write_json(json_file, [asdict(info) for info in infos])


@store_app.command("rm")
def rm(
    uri: Uri,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys to remove.")] = None,
    namespace: Namespace = None,
    spec_group: SpecGroup = None,
    rank: Rank = None,
    older_than: OlderThan = None,
    json_file: JsonFile = None,
) -> None:
    """Remove objects: those of the given keys, or all that the options select."""
    chosen = Filter(namespace=namespace, spec_group=spec_group, rank=rank, older_than_s=older_than)
    if bool(keys) is not chosen.is_empty:
        raise ConfigError("give either keys or options that select objects; `store clear` removes all")
    with closing(open_store(uri)) as store:
        if keys:
            found = list(dict.fromkeys(compress(keys, store.contains(keys))))
        else:
            found = [info.key for info in _list(store) if chosen.selects(info)]
        _remove(store, found, json_file)


@store_app.command("clear")
def clear(uri: Uri, namespace: Namespace = None, json_file: JsonFile = None) -> None:
    """Remove all objects, or all of a namespace; the store itself stays."""
    chosen = Filter(namespace=namespace, spec_group=None, rank=None, older_than_s=None)
    with closing(open_store(uri)) as store:
        _remove(store, [info.key for info in filter(chosen.selects, _list(store))], json_file)


def _remove(store: Store, keys: list[str], json_file: JsonFile) -> None:
    for start in range(0, len(keys), BATCH_KEYS):
        store.discard(keys[start : start + BATCH_KEYS])
    show(f"removed {len(keys)} objects", json_file)
    write_json(json_file, {"removed_objects": len(keys)})


@store_app.command("check")
def check(
    uri: Uri,
    fix: Annotated[bool, typer.Option("--fix", help="Discard what is corrupt, repair the index.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Verify every payload and the index; exit 1 when something was found wrong."""
    with closing(open_store(uri)) as store:
        if not isinstance(store, ChecksItself):
            raise ConfigError(f"a {type(store).__name__} does not check itself")
        report = store.check(fix=fix)
    show(
        f"{report.objects} objects, {format_bytes(report.used_bytes)}: {report.num_errors} errors "
        f"({report.corrupt_objects} corrupt, {report.lost_objects} lost); "
        f"{report.reserved_objects} reserved, {report.stale_entries} stale entries of the index"
        + ("; fixed" if report.is_fixed else ""),
        json_file,
    )
    write_json(json_file, {**asdict(report), "errors": report.num_errors})
    if report.num_errors:
        raise typer.Exit(1)
