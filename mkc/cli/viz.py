"""`mkc viz`: pictures of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mkc.cli.output import PICTURES
from mkc.cli.output import write_pictures
from mkc.cli.progress import working
from mkc.plan.folder import read_folder
from mkc.viz.names import Format
from mkc.viz.predict import subject_of
from mkc.viz.write import pictures


def viz_command(
    folder: Annotated[Path, typer.Argument(help="Folder that mkc compile wrote.")],
    out: Annotated[Path | None, typer.Option(help="Output folder; default FOLDER/viz.")] = None,
    format: Annotated[
        Format, typer.Option(help="html for exploring, png for documents.")
    ] = Format.HTML,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Draw a plan: timeline, VMEM map, graph, roofline and a Perfetto trace.

    Everything is predicted and needs no network. Every picture has a JSON twin.
    """
    plan = read_folder(folder)
    with working("simulating the step", quiet=quiet):
        subject = subject_of(plan)
    place = out or folder / PICTURES
    with working("drawing", quiet=quiet):
        written = write_pictures(place, pictures(subject, format))
    if not quiet:
        for name in written:
            typer.echo(str(place / name))
