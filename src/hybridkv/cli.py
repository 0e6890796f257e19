"""The command line: ``hybridkv --help``."""

import os
import re
import sys
from contextlib import suppress
from fractions import Fraction
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console, Group
from rich.progress import track
from rich.table import Table

from hybridkv import __version__
from hybridkv.cli_mooncake import mooncake_app
from hybridkv.cli_output import JsonFile, show, write_json
from hybridkv.cli_store import store_app
from hybridkv.errors import ConfigError, CorruptPayloadError, HybridKVError
from hybridkv.plan.boundaries import Retention
from hybridkv.sim.demo import DemoRow, demo_table, run_demo
from hybridkv.sim.naming import Tails
from hybridkv.sim.replay import Replay, ReplaySettings
from hybridkv.sim.trace import read_trace
from hybridkv.specs.layout_file import catalogue, find_layout
from hybridkv.units import format_bytes

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="KV cache outside the serving engine, for models that mix kinds of attention.",
)
app.add_typer(store_app, name="store")
app.add_typer(mooncake_app, name="mooncake")

MAX_MESSAGE_CHARS = 2000


def _version(value: bool) -> None:  # noqa: FBT001 - typer hands the flag over by position
    if value:
        typer.echo(f"hybridkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _retention(text: str) -> Retention:
    """Return the number that the text is, else the text: the settings check both."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 16
    return int(text) if is_number else cast(Retention, text)


def _scale(text: str) -> Fraction:
    if not re.fullmatch(r"[0-9]{1,12}([./][0-9]{1,12})?", text) or set(text.partition("/")[2]) == {"0"}:
        raise ConfigError(f"payload scale is {text[:80]!r}; give a fraction in (0, 1], such as 1/64")
    return Fraction(text)


@app.command(
    epilog="Example: hybridkv replay trace.jsonl --model gpt-oss-120b --store 'memory://?capacity=2GiB' "
    "--bytes --payload-scale 1/64 --limit 300"
)
def replay(
    trace: Annotated[Path, typer.Argument(help="Requests in the FAST'25 JSONL format.")],
    model: Annotated[str, typer.Option(help="A built-in model (see `hybridkv models`) or a layout file.")],
    store: Annotated[
        str, typer.Option(help="Where objects go, such as memory://?capacity=2GiB.")
    ] = "memory://",
    retention: Annotated[
        str, typer.Option(help="Kept boundaries: all, 0 (ends and branches only) or every N tokens.")
    ] = "all",
    object_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one full-attention or MLA object; default: one block.")
    ] = None,
    tails: Annotated[
        str, typer.Option(help="Partial last blocks: distinct (lower bound) or continued (upper bound).")
    ] = "distinct",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    prefill_tokens: Annotated[
        int | None, typer.Option(help="Tokens a prefill step computes at most; default: whole prompts.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Replay only the first N requests.")] = None,
    move_bytes: Annotated[
        bool, typer.Option("--bytes", help="Move real bytes and verify every loaded object.")
    ] = False,
    payload_scale: Annotated[str, typer.Option(help="Factor on every object's size.")] = "1",
    skip_bad: Annotated[bool, typer.Option(help="Count unreadable lines instead of stopping.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Replay a request trace through planner, keys and a store; report hits, keys and bytes."""
    layout = find_layout(model).with_tp(tp)
    if object_tokens is not None:
        layout = layout.with_object_tokens(object_tokens)
    settings = ReplaySettings(
        layout=layout,
        store_uri=store,
        retention=_retention(retention),
        tails=cast(Tails, tails),
        prefill_tokens=prefill_tokens,
        move_bytes=move_bytes,
        payload_scale=_scale(payload_scale),
    )
    run = Replay(settings)
    requests = read_trace(trace, limit=limit, skip_bad=skip_bad)
    run.report.skipped_lines, run.report.skip_reasons = requests.num_skipped, list(requests.skip_reasons)
    progress = track(
        requests.requests,
        "replaying",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    report = run.run(progress)
    show(report.render(), json_file)
    write_json(json_file, report.to_dict())


@app.command()
def demo(json_file: JsonFile = None) -> None:
    """Show what a prefix-only cache and hybridkv hit, write, load and ask at equal capacity."""
    rows: list[DemoRow] = []
    with Console(stderr=True).status("replaying with real bytes ..."):
        rows.extend(run_demo())
    show(demo_table(rows), json_file)
    write_json(
        json_file,
        [{"cache": row.cache, "capacity_bytes": row.capacity_bytes, **row.report.to_dict()} for row in rows],
    )


@app.command()
def models(json_file: JsonFile = None) -> None:
    """List the built-in layouts and where their numbers come from."""
    layouts = [find_layout(name) for name in catalogue()]
    table = Table("model", "spec group", "kind", "cache groups", "object tokens", "object bytes")
    for layout in layouts:
        last = layout.spec_groups[-1]
        for group in layout.spec_groups:
            table.add_row(
                layout.name if group.index == 0 else "",
                group.name,
                group.spec.kind,
                str(len(group.cache_groups)),
                str(group.object_size),
                format_bytes(group.object_bytes),
                end_section=group is last,
            )
    sources = [f"{layout.name}: {layout.source}" for layout in layouts]
    show(Group(table, *sources), json_file)
    write_json(
        json_file,
        [
            {
                "name": layout.name,
                "source": layout.source,
                "alignment": layout.alignment,
                "hash_unit": layout.hash_unit,
                "spec_groups": [
                    {
                        "name": group.name,
                        "kind": group.spec.kind,
                        "cache_groups": len(group.cache_groups),
                        "object_tokens": group.object_size,
                        "object_bytes": group.object_bytes,
                    }
                    for group in layout.spec_groups
                ],
            }
            for layout in layouts
        ],
    )


def main() -> None:
    """Run the command line: exit 0, 1 when something was found wrong, 2 on bad input or output."""
    _prepare_streams()
    try:
        app()
    except CorruptPayloadError as error:
        _fail(str(error), 1)
    except HybridKVError as error:
        _fail(str(error), 2)
    except MemoryError:
        _fail("out of memory; lower the store's capacity or the payload scale", 2)
    except OSError as error:
        _fail(f"output cannot be written: {error.strerror}", 2)


def _prepare_streams() -> None:
    """Let closed streams swallow what is written, and names in any script pass any terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for good
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    with suppress(OSError):
        sys.stderr.write(f"hybridkv: {line[:MAX_MESSAGE_CHARS]}\n")
        sys.stderr.flush()
    with suppress(OSError):
        sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
