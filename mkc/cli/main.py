"""The `mkc` command. User errors are one message on stderr and exit status 2."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated
from typing import Any

import typer
from typer.core import TyperCommand
from typer.core import TyperGroup

from mkc.errors import MkcError

DISTRIBUTION = "mkc-tpu"
USER_ERROR = 2  # exit status, the same as for a wrong option

# Module and function of each command, and its line in `mkc --help`. A module is imported when its
# command runs: most of them import JAX, which takes a second.
COMMANDS = {
    "bench": ("mkc.cli.bench:bench_command", "Measure how fast a model generates."),
    "chat": ("mkc.cli.chat:chat_command", "Chat with a model. /help lists the commands."),
    "compile": ("mkc.cli.compile:compile_command", "Compile a model into one TPU kernel."),
    "diff": (
        "mkc.cli.diff:diff_command",
        "Compare two plans: decisions, loads, buffers and predicted times.",
    ),
    "eval": ("mkc.cli.eval:eval_command", "Measure how many tasks of a file a model solves."),
    "explain": (
        "mkc.cli.explain:explain_command",
        "List a plan's decisions by weight, or explain one.",
    ),
    "models": ("mkc.cli.listing:models_command", "List the models that mkc ships."),
    "pack": ("mkc.cli.pack:pack_command", "Pack a checkpoint for the ranks of a kernel."),
    "run": (
        "mkc.cli.run:run_command",
        "Answer one prompt. Text appears on stdout as it is generated, thoughts are left out.",
    ),
    "serve": (
        "mkc.cli.serve:serve_command",
        "Serve a model to OpenAI clients. Listens on this machine only, unless told otherwise.",
    ),
    "targets": (
        "mkc.cli.listing:targets_command",
        "List the TPU generations and their topologies.",
    ),
    "verify": (
        "mkc.cli.verify:verify_command",
        "Prove a model's kernel, and check the proof against the kernel.",
    ),
    "viz": (
        "mkc.cli.viz:viz_command",
        "Draw a plan: timeline, VMEM map, graph, roofline and a Perfetto trace.",
    ),
}


def load_command(name: str) -> TyperCommand:
    """Imports a command of `COMMANDS`."""
    module, _, function = COMMANDS[name][0].partition(":")
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(name=name)(getattr(import_module(module), function))
    found = typer.main.get_command(alone)
    assert isinstance(found, TyperCommand)
    return found


class _LaterCommand(TyperCommand):
    """Stands for a command until it runs or shows its own help."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        assert self.name is not None
        return load_command(self.name).make_context(info_name, args, *rest, **extra)


class _Commands(TyperGroup):
    """The commands of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        if cmd_name not in COMMANDS:
            return None
        return _LaterCommand(name=cmd_name, help=COMMANDS[cmd_name][1])


app = typer.Typer(
    name="mkc",
    cls=_Commands,
    help="Compiles a model graph, written in Python, into one fused Pallas TPU kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


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
