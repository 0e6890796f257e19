"""How commands print: tables for people, JSON for programs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from hybridkv.errors import ConfigError

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output."),
]


def write_json(target: Path | None, data: object) -> None:
    """Write the results where the option says.

    Raises:
        ConfigError: the file cannot be written.
    """
    if target is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if str(target) == "-":
        sys.stdout.write(text)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {target}: cannot be written: {error.strerror}") from None


def show(renderable: RenderableType, json_file: Path | None) -> None:
    """Print for people, unless standard output carries the JSON; names are text, never markup."""
    if str(json_file) != "-":
        width = None if sys.stdout.isatty() else 120
        Console(width=width, markup=False, highlight=False, emoji=False).print(renderable)
