"""The steps of `mkc verify`, and how their verdicts are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import typer
from jax.experimental.pallas import tpu as pltpu
from rich.console import Console
from rich.markup import escape

from mkc.cli.lookup import model_graph
from mkc.cli.progress import working
from mkc.cli.races import Reduced
from mkc.cli.races import find_races
from mkc.cli.speculation import NONE
from mkc.cli.speculation import check_scheme
from mkc.cli.speculation import scheme_round
from mkc.codegen_pallas.aot import compile_ahead
from mkc.driver import LARGEST_BATCH
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.errors import BatchError
from mkc.errors import KernelFileError
from mkc.ir.graph import Graph
from mkc.runtime.kernel import load_module
from mkc.runtime.kernel import mesh_of
from mkc.schedule.lint import lint_program
from mkc.schedule.lint import lint_source
from mkc.schedule.lint import lint_traced
from mkc.schedule.verify import CODES
from mkc.schedule.verify import OBLIGATIONS
from mkc.schedule.verify import Issue
from mkc.schedule.verify import prove
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import Kind
from mkc.schedule.verify.case import following_case
from mkc.schedule.verify.compare import check_traced
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.trace import TraceError
from mkc.schedule.verify.trace import pallas_kernel
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of

HOLDS, FAILS, SKIPPED = "holds", "fails", "skipped"
LABELS = {HOLDS: "holds", FAILS: "FAILS", SKIPPED: "skipped"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command."""

    model: str
    target: str
    batch: int
    context: int
    config: Path | None
    tp: int | None
    passes: str
    spec: str | None
    draft: Path | None
    rounds_per_launch: int
    logits: bool
    token_masks: bool
    kernel: Path | None
    trace: bool
    races: bool
    races_config: Path | None
    races_draft: Path | None
    aot: bool

    @property
    def drafts(self) -> bool:
        """There is a scheme that drafts."""
        return self.spec is not None and self.spec != NONE

    def graph(self, config: Path | None, draft: Path | None) -> Graph:
        """Of a step or a round, with these configs of model and drafter."""
        if self.spec is None or not self.drafts:
            return model_graph(
                self.model, batch=self.batch, context=self.context, config_path=config
            )
        return scheme_round(
            self.model,
            self.spec,
            draft,
            batch=self.batch,
            context=self.context,
            config_path=config,
        ).graph

    def compiled(self, graph: Graph) -> CompileResult:
        return compile_graph(
            CompileRequest(
                graph=graph,
                target=self.target,
                tp=self.tp,
                passes=self.passes,
                logits=self.logits,
                token_masks=self.token_masks,
                rounds_per_launch=self.rounds_per_launch,
                aot=False,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One obligation: whether it holds, on what ground, and what contradicts it."""

    name: str
    status: str
    ground: str
    issues: Sequence[Issue] = field(default_factory=tuple)


def run_verification(request: Request, *, quiet: bool) -> list[Verdict]:
    """Every step that is asked for, in order.

    Raises:
      MkcError: the model, the options or the kernel file are not usable.
    """
    if not 1 <= request.batch <= LARGEST_BATCH:
        raise BatchError(batch=request.batch, limit=LARGEST_BATCH)
    check_scheme(request.spec, None if request.draft is None else str(request.draft))
    text = read_kernel(request.kernel) if request.kernel else None
    with working(f"proving {request.model}", quiet=quiet):
        result = request.compiled(request.graph(request.config, request.draft))
        source = result.kernel_source if text is None else text
        verdicts = [*_proof(result), *_lint(result, source)]
    with working("tracing the kernel", quiet=quiet):
        verdicts += _traced(request, result, source)
    with working("looking for races", quiet=quiet):
        verdicts.append(_races(request, result))
    with working("compiling for the TPU", quiet=quiet):
        verdicts.append(_aot(request, result, source))
    return verdicts


def read_kernel(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelFileError(path=path, problem=f"cannot be read ({error})") from error


def _proof(result: CompileResult) -> Iterator[Verdict]:
    """One verdict per obligation, on the program."""
    program = result.lowered.program
    proof = prove([program] * program.ranks, result.target)
    ground = f"{len(proof.cases)} kinds of launches, {proof.events} events, {program.ranks} ranks"
    for name, holds in proof.checks().items():
        yield Verdict(
            name=name,
            status=HOLDS if holds else FAILS,
            ground=f"{OBLIGATIONS[name]} ({ground})",
            issues=[one for one in proof.issues if CODES[one.code].obligation == name],
        )


def _lint(result: CompileResult, source: str) -> Iterator[Verdict]:
    found = [*lint_program(result.lowered.program, result.target), *lint_source(source)]
    yield Verdict(
        name="lint",
        status=FAILS if found else HOLDS,
        ground="nothing in program and text that works in interpret mode only",
        issues=found,
    )


def _traced(request: Request, result: CompileResult, source: str) -> Iterator[Verdict]:
    """The kernel's own text against what was proven of the program."""
    same = source == result.kernel_source
    if not request.trace:
        yield Verdict(name="kernel", status=SKIPPED, ground="not asked (--no-trace)")
        return
    program = result.lowered.program
    case = launch_of(result)
    try:
        kernel, module = trace_kernel(request, source, program.ranks)
        names = reference_names(module.SPEC)
        tracers = [tracer_of(program, rank, case) for rank in range(program.ranks)]
        events = [one.run(kernel, names) for one in tracers]
    except TraceError as error:
        ground = f"the order of the kernel is not known before it runs: {error}"
        yield Verdict(name="kernel", status=FAILS, ground=ground)
        return
    except KernelFileError as error:
        yield Verdict(name="kernel", status=FAILS, ground=error.message)
        return
    yield _compared(result, case, events, same=same)
    hints = lint_traced(kernel, [hint for one in tracers for hint in one.hints])
    yield Verdict(
        name="traced lint",
        status=FAILS if hints else HOLDS,
        ground="every primitive has a lowering, and every statement about multiples is true",
        issues=hints,
    )


def launch_of(result: CompileResult) -> Case:
    """A launch that crosses a tile of the cache, and stops when it has run one round."""
    program = result.lowered.program
    tile = max((one.tile for one in program.caches), default=1)
    position = min(program.context - 1, tile)
    if program.round is None:
        return Case(name="traced", positions=((position,) * program.batch,))
    size = program.round.rows_per_sequence
    position = max(0, min(position, program.context - size) - 1)  # rows in two blocks
    everything = (size,) * program.batch
    counts = (max(1, size - 1),) * program.batch
    kind = Kind(positions=(position,) * program.batch, rows=everything, counts=counts)
    return following_case(program, kind, rounds=1, ran=1)


def _compared(
    result: CompileResult, case: Case, events: list[list[Event]], *, same: bool
) -> Verdict:
    program = result.lowered.program
    for rank, found in enumerate(events):
        problem = difference(expected_events(program, rank, case), found)
        if problem is not None:
            break
    else:
        text = "the generated text" if same else "an edited text; its arithmetic is not proven"
        count = sum(map(len, events))
        ground = f"{text}: {count} traced events of all ranks are those that were proven"
        return Verdict(name="kernel", status=HOLDS, ground=ground)
    issues = check_traced(program, events)
    ground = (
        f"rank {rank} differs from the program that was proven ({problem}). Checked by themselves: "
        f"copies, waits, slots, messages and progress of one launch. Not proven: that readers find "
        f"what they mean, and other launches"
    )
    return Verdict(
        name="kernel", status=FAILS if issues or same else SKIPPED, ground=ground, issues=issues
    )


def trace_kernel(request: Request, source: str, ranks: int) -> tuple[Any, ModuleType]:
    """What Pallas makes of a kernel. Raises `KernelFileError` when it does not trace."""
    try:
        module = load_module(source)
        mesh = mesh_of(jax.devices("cpu")[:ranks])
        step = module.build(mesh, pltpu.InterpretParams())
        arguments = module.abstract_arguments(mesh)
        return pallas_kernel(jax.make_jaxpr(step)(*arguments)), module
    except Exception as error:  # an edited kernel may do anything
        if request.kernel is None:
            raise
        problem = f"does not trace ({type(error).__name__}: {error})"
        raise KernelFileError(path=request.kernel, problem=problem) from error


def _races(request: Request, result: CompileResult) -> Verdict:
    if not request.races:
        return Verdict(name="races", status=SKIPPED, ground="not asked (--no-races)")
    if request.kernel is not None:
        ground = "the race detector runs the generated kernel of a reduced plan only"
        return Verdict(name="races", status=SKIPPED, ground=ground)

    reduced = Reduced(config=request.races_config, draft=request.races_draft, drafts=request.drafts)
    found = find_races(
        request.model,
        result,
        lambda config, draft: request.compiled(request.graph(config, draft)),
        config=request.config,
        reduced=reduced,
    )
    if found.ran is None:
        return Verdict(name="races", status=SKIPPED, ground=found.ground)
    return Verdict(name="races", status=HOLDS if found.ran else FAILS, ground=found.ground)


def _aot(request: Request, result: CompileResult, source: str) -> Verdict:
    if not request.aot:
        return Verdict(name="TPU compiler", status=SKIPPED, ground="not asked (--no-aot)")
    assert result.target.topology is not None
    found = compile_ahead(source, topology=result.target.topology.full_name)
    if not found.ok:
        ground = found.error or "no message"
        return Verdict(name="TPU compiler", status=FAILS, ground=ground.strip().splitlines()[0])
    ground = f"accepted for {result.target.name}: {found.bundles} bundles"
    return Verdict(name="TPU compiler", status=HOLDS, ground=ground)


def print_verdicts(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """A line per obligation, with what contradicts it; or JSON."""
    if as_json:
        document = {
            "ok": all(one.status != FAILS for one in verdicts),
            "verdicts": [
                {**asdict(one), "issues": [asdict(issue) for issue in one.issues]}
                for one in verdicts
            ],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(one.name) for one in verdicts)
    for one in verdicts:
        label = LABELS[one.status]
        console.print(f"[bold]{one.name:<{width}}[/bold]  {label:<7}  {escape(one.ground)}")
        for issue in one.issues:
            console.print(escape(f"{'':<{width}}  {issue}"))
            console.print(escape(f"{'':<{width}}  usual cause: {issue.hint}"))
