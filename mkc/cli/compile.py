"""`mkc compile`: a model to a kernel, checked by the TPU compiler."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mkc.cli.lookup import model_graph
from mkc.cli.output import check_folder
from mkc.cli.output import default_folder
from mkc.cli.output import emit_text
from mkc.cli.output import json_text
from mkc.cli.output import write_folder
from mkc.cli.progress import working
from mkc.cli.speculation import NONE
from mkc.cli.speculation import SpecOption
from mkc.cli.speculation import check_scheme
from mkc.cli.speculation import implied_scheme
from mkc.cli.speculation import scheme_round
from mkc.cli.summary import print_summary
from mkc.codegen_pallas.aot_stages import compiler_stages
from mkc.driver import LARGEST_BATCH
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.errors import AheadOfTimeError
from mkc.errors import BatchError
from mkc.errors import ContextError
from mkc.ir.graph import Graph
from mkc.plan.folder import read_folder
from mkc.plan.weights import weigh
from mkc.targets import load_target
from mkc.viz.stages import stages
from mkc.viz.stages import stages_html


class Emit(StrEnum):
    """What to print instead of writing a folder."""

    GRAPH = "graph"  # the model's graph
    PASSES = "passes"  # a page with the IR before and after each pass, and the decisions
    PROGRAM = "program"  # the schedule
    KERNEL = "kernel"  # kernel.py
    MOSAIC = "mosaic"  # what the TPU compiler receives
    BUNDLES = "bundles"  # its machine code


def compile_command(
    model: Annotated[str, typer.Argument(help="A name of `mkc models`, or file.py:function.")],
    target: Annotated[
        str, typer.Option(help="GENERATION or GENERATION:TOPOLOGY, see `mkc targets`.")
    ] = "tpu7x:2x2x1",
    batch: Annotated[int, typer.Option(help="Independent sequences per step, 1 to 8.")] = 1,
    context: Annotated[int, typer.Option(help="Positions the caches hold.")] = 4096,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder; default build/MODEL-TARGET-bBATCH-cCONTEXT. With --emit, a file."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json, or a checkpoint folder with one.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default all devices of the topology.")
    ] = None,
    passes: Annotated[str, typer.Option(help="Options of the passes, as text.")] = "",
    spec: SpecOption = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Drafter's config.json, or a checkpoint folder with one."),
    ] = None,
    rounds_per_launch: Annotated[
        int, typer.Option(min=1, help="Decode steps, or rounds, that one launch may run.")
    ] = 1,
    logits: Annotated[bool, typer.Option(help="The kernel returns the logits too.")] = False,
    token_masks: Annotated[
        bool,
        typer.Option(
            help="The kernel reads which tokens may come next; one that drafts always does."
        ),
    ] = False,
    aot: Annotated[bool, typer.Option(help="Compile ahead of time with the TPU compiler.")] = True,
    phase_times: Annotated[
        bool,
        typer.Option(help="Take the predicted times of phases from the compiler's machine code."),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print report.json only.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
    emit: Annotated[
        Emit | None, typer.Option(help="Print one stage, or write it to --out, and no folder.")
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
    check_scheme(spec, None if draft is None else str(draft))
    spec = implied_scheme(spec, draft)
    drafting = spec is not None and spec != NONE
    name = f"{model}-{spec}" if drafting else model
    folder = out or default_folder(name, target, batch, context)
    if emit is None:
        check_folder(folder)

    def graphs_of(sequences: int, positions: int) -> tuple[Graph, Graph | None]:
        """What is compiled, and what reads prompts where that is another graph."""
        if spec is not None and drafting:
            scheme = scheme_round(
                model, spec, draft, batch=sequences, context=positions, config_path=config
            )
            return scheme.graph, scheme.prefill
        return model_graph(model, batch=sequences, context=positions, config_path=config), None

    graph, prompts = graphs_of(batch, context)
    request = CompileRequest(
        graph=graph,
        prompts=prompts,
        retrace=lambda sequences, positions: graphs_of(sequences, positions)[0],
        target=target,
        tp=tp,
        passes=passes,
        logits=logits,
        token_masks=token_masks,
        rounds_per_launch=rounds_per_launch,
        aot=aot and emit is None,
        phase_times=phase_times,
    )
    what = f"compiling {request.graph.name} for {target}"
    with working(what, quiet=quiet or json):
        result = compile_graph(request)
        text = _emitted(request, result, emit) if emit is not None else ""
    if emit is not None:
        emit_text(text, out)
        return
    write_folder(folder, result)
    if json:
        typer.echo(json_text(result.report), nl=False)
    elif not quiet:
        print_summary(result.report, folder, weigh(read_folder(folder)))


def _emitted(request: CompileRequest, result: CompileResult, emit: Emit) -> str:
    """The text of a stage. Raises `AheadOfTimeError` when the TPU compiler refuses the kernel."""
    match emit:
        case Emit.GRAPH:
            return result.graph_text
        case Emit.PASSES:
            found = stages(result.graph, result.lowered, result.target)
            return stages_html(request.graph.name, result.target.name, found)
        case Emit.PROGRAM:
            return result.program_text
        case Emit.KERNEL:
            return result.kernel_source
    assert result.target.topology is not None
    texts = compiler_stages(result.kernel_source, topology=result.target.topology.full_name)
    if texts.error:
        raise AheadOfTimeError(target=result.target.name, message=texts.error)
    return texts.mosaic if emit is Emit.MOSAIC else texts.bundles
