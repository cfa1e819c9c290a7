"""The steps of `mkc verify`, and how their verdicts are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import typer
from jax.experimental.pallas import tpu as pltpu
from rich.console import Console
from rich.markup import escape

from mkc.cli.edited import LAUNCH
from mkc.cli.edited import launch_differences
from mkc.cli.lookup import model_graph
from mkc.cli.progress import working
from mkc.cli.races import Reduced
from mkc.cli.races import find_races
from mkc.cli.reduced import Lower
from mkc.cli.reduced import Mesh
from mkc.cli.reduced import SmallPlan
from mkc.cli.speculation import NONE
from mkc.cli.speculation import check_scheme
from mkc.cli.speculation import implied_scheme
from mkc.cli.speculation import scheme_round
from mkc.codegen_pallas.aot import compile_ahead
from mkc.codegen_pallas.source import kernel_source
from mkc.codegen_pallas.support import KernelSpec
from mkc.driver import LARGEST_BATCH
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.driver import lower_graph
from mkc.errors import BatchError
from mkc.errors import KernelFileError
from mkc.ir.graph import Graph
from mkc.ir.token_masks import with_token_masks
from mkc.runtime.kernel import load_module
from mkc.runtime.kernel import mesh_of
from mkc.schedule.lint import lint_source
from mkc.schedule.lint import lint_traced
from mkc.schedule.program import Program
from mkc.schedule.verify import CODES
from mkc.schedule.verify import OBLIGATIONS
from mkc.schedule.verify import Issue
from mkc.schedule.verify.accesses import Access
from mkc.schedule.verify.accesses import access_difference
from mkc.schedule.verify.all_ranks import difference_of_all
from mkc.schedule.verify.all_ranks import expected_of_all
from mkc.schedule.verify.all_ranks import traced_of_all
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import Kind
from mkc.schedule.verify.case import following_case
from mkc.schedule.verify.case import launches_of
from mkc.schedule.verify.compare import check_traced
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.decisions import decisions
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.trace import TraceError
from mkc.schedule.verify.trace import Tracer
from mkc.schedule.verify.trace import pallas_kernel
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of

HOLDS, FAILS, SKIPPED = "holds", "fails", "skipped"
MOST_DECISIONS = 3  # that a verdict names
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

    def lowered(self, graph: Graph, mesh: Mesh, options: str) -> SmallPlan:
        """With further options of passes, on a mesh that no topology need have."""
        if self.token_masks:
            graph = with_token_masks(graph)
        found = lower_graph(
            graph,
            mesh.target,
            tp=mesh.ranks,
            passes=",".join(filter(None, (self.passes, options))),
            logits=self.logits,
            rounds_per_launch=self.rounds_per_launch,
        )
        source = kernel_source(found.program, found.steps, target=mesh.target)
        return SmallPlan(graph=graph, lowered=found, source=source)


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
    request = replace(request, spec=implied_scheme(request.spec, request.draft))
    text = read_kernel(request.kernel) if request.kernel else None
    with working(f"proving {request.model}", quiet=quiet):
        result = request.compiled(request.graph(request.config, request.draft))
        source = result.kernel_source if text is None else text
        verdicts = [*_proof(result, edited=text is not None), *_lint(result, source)]
    with ThreadPoolExecutor(1) as beside:  # the compiler is a process of its own
        ahead = beside.submit(_aot, request, result, source)
        with working("tracing the kernel", quiet=quiet):
            verdicts += _traced(request, result, source)
        with working("looking for races", quiet=quiet):
            verdicts.append(_races(request, result))
        with working("compiling for the TPU", quiet=quiet):
            verdicts.append(ahead.result())
    return verdicts


def read_kernel(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelFileError(path=path, problem=f"cannot be read ({error})") from error


def _proof(result: CompileResult, *, edited: bool) -> Iterator[Verdict]:
    """One verdict per obligation, on the program; a kernel file that is given has no program."""
    proof, program = result.proof, result.lowered.program
    ground = f"{len(proof.cases)} kinds of launches, {proof.events} events, {program.ranks} ranks"
    if edited:
        ground = f"of the generated program: {ground}"
    for name, holds in proof.checks().items():
        yield Verdict(
            name=name,
            status=HOLDS if holds else FAILS,
            ground=f"{OBLIGATIONS[name]} ({ground})",
            issues=[one for one in proof.issues if CODES[one.code].obligation == name],
        )


def _lint(result: CompileResult, source: str) -> Iterator[Verdict]:
    """Of the text; what `compile_graph` returns has no findings in its program."""
    found = lint_source(source)
    yield Verdict(
        name="lint",
        status=FAILS if found else HOLDS,
        ground="nothing in program and text that works in interpret mode only",
        issues=found,
    )


def _traced(request: Request, result: CompileResult, source: str) -> Iterator[Verdict]:
    """The kernel's own text against what was proven of the program."""
    if not request.trace:
        yield Verdict(name="kernel", status=SKIPPED, ground="not asked (--no-trace)")
        return
    same = source == result.kernel_source
    program = result.lowered.program
    generated = load_module(result.kernel_source)
    try:
        module = generated if same else load_kernel(request, source)
        problems = [] if same else launch_differences(generated, module)
        if problems:
            ground = f"around its body it is not the kernel that was proven: {'; '.join(problems)}"
            yield Verdict(name="kernel", status=FAILS, ground=ground)
            return
        kernel = trace_kernel(request, module, program.ranks)
        known = kernel if same else trace_kernel(request, generated, program.ranks)
        beside = None if same else known
        launches = traced_launches(request, result, kernel, module.SPEC, beside=beside)
    except TraceError as error:
        ground = f"the order of the kernel is not known before it runs: {error}"
        yield Verdict(name="kernel", status=FAILS, ground=ground)
        return
    except KernelFileError as error:
        yield Verdict(name="kernel", status=FAILS, ground=error.message)
        return
    if same:
        yield _compared(program, launches, same=True)
    else:
        generated_decisions = set(decisions(known))
        new = [one for one in decisions(kernel) if one not in generated_decisions]
        yield _compared(program, launches, same=False, new=new)
    hints = lint_traced(kernel, [hint for one in launches for hint in one.hints])
    yield Verdict(
        name="traced lint",
        status=FAILS if hints else HOLDS,
        ground="every primitive has a lowering, and every statement about multiples is true",
        issues=hints,
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that was traced: the events of all ranks, or of rank 0 alone.

    Attributes:
      hints: statements about multiples that are not true.
      touches: in what an edited kernel touches something else than the generated one, None for
        nothing.
    """

    case: Case
    events: Sequence[Sequence[Event]]
    hints: Sequence[str]
    touches: str | None


def traced_launches(
    request: Request, result: CompileResult, kernel: Any, spec: KernelSpec, *, beside: Any
) -> list[Launch]:
    """One launch on all ranks; an edited text may differ in any, so all kinds on one rank too.

    Args:
      beside: the generated kernel where `kernel` is an edited one, else None.

    Raises:
      TraceError: what the kernel does depends on data.
      KernelFileError: an edited kernel does what no tracer follows.
    """
    program = result.lowered.program
    planned = [(launch_of(result), program.ranks)]
    if beside is not None:
        planned += [(case, 1) for case in launches_of(program)]
    names = reference_names(spec)
    found = []
    try:
        for case, ranks in planned:
            first = tracer_of(program, 0, case)
            first.accesses = None if beside is None else []
            if ranks == 1 or beside is not None:
                first.run(kernel, names)
            events: Sequence[Sequence[Event]] = [first.events]
            hints = first.hints
            if ranks > 1:
                events, hints = traced_of_all(program, case, kernel, names)
            touches = _touches(tracer_of(program, 0, case), beside, names, first.accesses)
            found.append(Launch(case=case, events=events, hints=hints, touches=touches))
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        if beside is None:
            raise
        assert request.kernel is not None
        problem = f"cannot be followed ({type(error).__name__}: {error})"
        raise KernelFileError(path=request.kernel, problem=problem) from error
    return found


def _touches(
    tracer: Tracer, beside: Any, names: Sequence[str], found: Sequence[Access] | None
) -> str | None:
    """Runs the generated kernel, too, and compares what rank 0 touches."""
    if found is None:
        return None
    tracer.accesses = []
    tracer.run(beside, names)
    return access_difference(tracer.accesses, found)


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
    program: Program, launches: Sequence[Launch], *, same: bool, new: Sequence[str] = ()
) -> Verdict:
    """`new` are decisions of an edited text that the generated one does not make."""
    problem = next(_differences(program, launches), None)
    if problem is not None:
        return _checked_alone(program, launches, problem + _decides(new), same=same)
    first, *others = launches
    ground = f"{sum(map(len, first.events))} traced events of all ranks"
    if same:
        ground = f"the generated text: {ground} are those that were proven"
        return Verdict(name="kernel", status=HOLDS, ground=ground)
    more = sum(len(events) for one in others for events in one.events)
    ground = (
        f"an edited text; its arithmetic is not proven: {ground}, and {more} of rank 0 in "
        f"{len(others)} kinds of launches, are those that were proven"
    )
    touches = next((one for one in launches if one.touches is not None), None)
    if touches is not None:
        ground += (
            f". Not proven: it does not touch the same as the generated kernel; in the launch "
            f"'{touches.case.name}', {touches.touches}"
        )
    ground += _decides(new)
    status = FAILS if new else HOLDS if touches is None else SKIPPED
    return Verdict(name="kernel", status=status, ground=ground)


def _decides(new: Sequence[str]) -> str:
    if not new:
        return ""
    some = "; ".join(new[:MOST_DECISIONS])
    return f". Other launches may go another way: the generated kernel does not decide by {some}"


def _differences(program: Program, launches: Sequence[Launch]) -> Iterator[str]:
    for one in launches:
        if len(one.events) > 1:
            found = difference_of_all(expected_of_all(program, one.case), one.events)
        else:
            problem = difference(expected_events(program, 0, one.case), one.events[0])
            found = None if problem is None else (0, problem)
        if found is not None:
            rank, problem = found
            yield (
                f"rank {rank} differs from the program that was proven, in the launch "
                f"'{one.case.name}' ({problem})"
            )


def _checked_alone(
    program: Program, launches: Sequence[Launch], problem: str, *, same: bool
) -> Verdict:
    """A kernel whose events are not the proven ones; the issues are those of one launch."""
    issues = next(filter(None, (check_traced(program, one.events) for one in launches)), [])
    what = "copies, waits, slots, messages and progress of one launch"
    if len(launches) > 1:
        what += f", on rank 0 copies, waits and slots of {len(launches) - 1} kinds of launches"
    ground = (
        f"{problem}. Checked by themselves: {what}. Not proven: that readers find what they mean, "
        f"and other launches"
    )
    return Verdict(
        name="kernel", status=FAILS if issues or same else SKIPPED, ground=ground, issues=issues
    )


def load_kernel(request: Request, source: str) -> ModuleType:
    """The module of a kernel file. Raises `KernelFileError` when it is not one."""
    assert request.kernel is not None
    try:
        module = load_module(source)
    except Exception as error:  # an edited kernel may do anything
        problem = f"does not trace ({type(error).__name__}: {error})"
        raise KernelFileError(path=request.kernel, problem=problem) from error
    missing = [name for name in ("SPEC", *LAUNCH) if not hasattr(module, name)]
    if missing:
        raise KernelFileError(path=request.kernel, problem=f"has no {', '.join(missing)}")
    return module


def trace_kernel(request: Request, module: ModuleType, ranks: int) -> Any:
    """What Pallas makes of a kernel. Raises `KernelFileError` when it does not trace."""
    try:
        mesh = mesh_of(jax.devices("cpu")[:ranks])
        step = module.build(mesh, pltpu.InterpretParams())
        return pallas_kernel(jax.make_jaxpr(step)(*module.abstract_arguments(mesh)))
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

    reduced = Reduced(
        config=request.races_config,
        draft=request.races_draft,
        scheme=request.spec if request.drafts else None,
    )

    def lower(config: Path | None, draft: Path | None) -> Lower:
        return partial(request.lowered, request.graph(config, draft))

    found = find_races(request.model, result, lower, reduced=reduced)
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
