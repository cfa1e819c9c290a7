"""`mkc pack`: a checkpoint to the weights of a kernel, one file per rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import DownloadColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeRemainingColumn
from rich.progress import TransferSpeedColumn

from mkc.cli.lookup import model_graph
from mkc.cli.shipped import checkpoint_named
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.cli.speculation import check_scheme
from mkc.cli.speculation import scheme_round
from mkc.cli.speculation import wanted_drafter
from mkc.driver import choose_topology
from mkc.driver import lower_graph
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.checkpoint import CheckReport
from mkc.runtime.container import PackResult
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.layout import pack_layout
from mkc.runtime.manifest import drafter_identity
from mkc.runtime.pair import check_pair
from mkc.runtime.pair import paired

GIGABYTE = 1_000_000_000
# The packed bytes are the same for every batch and context; a short one fits every target.
BATCH = 1
CONTEXT = 256


def pack_command(
    model: Annotated[str, typer.Argument(help="A name of `mkc models`, or file.py:function.")],
    weights: Annotated[
        str,
        typer.Option(help="Checkpoint folder, or OWNER/NAME[@REVISION] of the Hugging Face hub."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; continued when it is not finished.")],
    spec: SpecOption = None,
    draft: DraftOption = None,
    target: Annotated[
        str, typer.Option(help="GENERATION or GENERATION:TOPOLOGY, see `mkc targets`.")
    ] = "tpu7x:2x2x1",
    tp: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default all devices of the topology.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub checkpoint.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json; default the checkpoint's own.")
    ] = None,
    passes: Annotated[str, typer.Option(help="Options of the passes, as text.")] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse tensors that the model does not name.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything again and compare checksums.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings.")] = False,
) -> None:
    """Pack a checkpoint for the ranks of a kernel.

    Run it again to continue after a kill or a full disk. HF_HUB_OFFLINE=1 keeps it off the network.
    """
    check_scheme(spec, draft)
    checkpoint = Checkpoint.open(checkpoint_named(weights), revision=revision)
    source = config or checkpoint.folder
    drafter = wanted_drafter(spec, draft, folder=checkpoint.folder, by_default=False)
    identity: tuple[str, ...] = ()
    if drafter is None:
        graph = model_graph(model, batch=BATCH, context=CONTEXT, config_path=source)
        found = checkpoint.check(graph, strict=strict)
    else:
        drafts = Checkpoint.open(drafter.checkpoint)
        graph = scheme_round(
            model, drafter.name, drafts.folder, batch=BATCH, context=CONTEXT, config_path=source
        ).graph
        found = check_pair(graph, checkpoint, drafts, strict=strict)
        identity = drafter_identity(drafter.name, drafts.config)
        checkpoint = paired(checkpoint, drafts)
    lowered = lower_graph(graph, choose_topology(graph, target, tp), tp=tp, passes=passes)
    total = pack_layout(lowered).bytes
    with progress_bar("packing", total, quiet=quiet) as bar:
        result = pack(checkpoint, lowered, out, drafter=identity, progress=bar.advance)
    if verify:
        with progress_bar("verifying", total, quiet=quiet) as bar:
            load_packed(out, lowered, identity).verify(bar.advance)
    _warn(result)
    if not quiet:
        _summary(found, result, ranks=lowered.program.ranks, folder=out)


class Bar:
    """A progress bar that may be used from several threads."""

    def __init__(self, progress: Progress, total: int, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self._progress.advance(self._task, count)


@contextmanager
def progress_bar(title: str, total: int, *, quiet: bool) -> Iterator[Bar]:
    """A bar on stderr while the block runs; nothing when quiet or not on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield Bar(progress, total, title)


def _warn(result: PackResult) -> None:
    for name in result.not_finite:
        print(f"warning: tensor '{name}' has a NaN or an infinity", file=sys.stderr)


def _summary(found: CheckReport, result: PackResult, *, ranks: int, folder: Path) -> None:
    typer.echo(f"{folder}: {result.bytes / GIGABYTE:.2f} GB for {ranks} ranks")
    if result.continued_bytes == result.bytes:
        typer.echo("it was finished already")
    elif result.continued_bytes:
        share = 100 * result.continued_bytes / result.bytes
        typer.echo(f"continued: {share:.0f} % of it was there already")
    if found.converted:
        typer.echo(f"converted: {len(found.converted)} tensors of another type than the model's")
    if found.extra:
        typer.echo(f"left out: {len(found.extra)} tensors that the model does not name")
