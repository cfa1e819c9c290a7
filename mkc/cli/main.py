"""Entry point of the `mkc` command. User errors are one message on stderr and exit status 2."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from mkc.cli.chat import chat_command
from mkc.cli.compile import compile_command
from mkc.cli.listing import models_command
from mkc.cli.listing import targets_command
from mkc.cli.pack import pack_command
from mkc.cli.run import run_command
from mkc.errors import MkcError

DISTRIBUTION = "mkc-tpu"
USER_ERROR = 2  # exit status, the same as for a wrong option

app = typer.Typer(
    name="mkc",
    help="Compiles a model graph, written in Python, into one fused Pallas TPU kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(name="chat")(chat_command)
app.command(name="compile")(compile_command)
app.command(name="models")(models_command)
app.command(name="pack")(pack_command)
app.command(name="run")(run_command)
app.command(name="targets")(targets_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mkc {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except MkcError as error:
        print(error.report(), file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
