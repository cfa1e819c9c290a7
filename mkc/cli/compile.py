"""`mkc compile`: a model to a kernel, checked by the TPU compiler."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mkc.cli.lookup import model_graph
from mkc.cli.output import check_folder
from mkc.cli.output import default_folder
from mkc.cli.output import json_text
from mkc.cli.output import write_folder
from mkc.cli.summary import print_summary
from mkc.driver import LARGEST_BATCH
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.errors import BatchError
from mkc.errors import ContextError
from mkc.ir.graph import Graph
from mkc.targets import load_target


class Emit(StrEnum):
    """What to print instead of writing a folder."""

    GRAPH = "graph"
    PASSES = "passes"
    PROGRAM = "program"
    KERNEL = "kernel"


def compile_command(
    model: Annotated[str, typer.Argument(help="A name of `mkc models`, or file.py:function.")],
    target: Annotated[
        str, typer.Option(help="GENERATION or GENERATION:TOPOLOGY, see `mkc targets`.")
    ] = "tpu7x:2x2x1",
    batch: Annotated[int, typer.Option(help="Independent sequences per step, 1 to 8.")] = 1,
    context: Annotated[int, typer.Option(help="Positions the caches hold.")] = 4096,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; default build/MODEL-TARGET-bBATCH-cCONTEXT."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json, or a checkpoint folder with one.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default all devices of the topology.")
    ] = None,
    passes: Annotated[str, typer.Option(help="Options of the passes, as text.")] = "",
    rounds_per_launch: Annotated[
        int, typer.Option(min=1, help="Decode steps that one launch may run.")
    ] = 1,
    logits: Annotated[bool, typer.Option(help="The kernel returns the logits too.")] = False,
    aot: Annotated[bool, typer.Option(help="Compile ahead of time with the TPU compiler.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print report.json only.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
    emit: Annotated[
        Emit | None, typer.Option(help="Print this and write nothing; implies --no-aot.")
    ] = None,
) -> None:
    """Compile a model into one TPU kernel.

    Writes kernel.py, plan.json, report.json, graph.txt and program.txt.
    """
    load_target(target)  # what is wrong with the request is said before the long work starts
    if not 1 <= batch <= LARGEST_BATCH:
        raise BatchError(batch=batch, limit=LARGEST_BATCH)
    if context < 1:
        raise ContextError(
            context=context, expected="at least one position", hint="Choose a larger --context"
        )
    folder = out or default_folder(model, target, batch, context)
    if emit is None:
        check_folder(folder)

    def graph_of(sequences: int) -> Graph:
        return model_graph(model, batch=sequences, context=context, config_path=config)

    request = CompileRequest(
        graph=graph_of(batch),
        retrace=graph_of,
        target=target,
        tp=tp,
        passes=passes,
        logits=logits,
        rounds_per_launch=rounds_per_launch,
        aot=aot and emit is None,
    )
    result = compile_graph(request)
    if emit is not None:
        typer.echo(_emitted(result, emit).rstrip("\n"))
        return
    write_folder(folder, result)
    if json:
        typer.echo(json_text(result.report), nl=False)
    elif not quiet:
        print_summary(result.report, folder)


def _emitted(result: CompileResult, emit: Emit) -> str:
    match emit:
        case Emit.GRAPH:
            return result.graph_text
        case Emit.PASSES:
            return str(result.plan["pipeline"])
        case Emit.PROGRAM:
            return result.program_text
        case Emit.KERNEL:
            return result.kernel_source
