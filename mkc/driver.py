"""From a graph to a kernel: passes, source, ahead-of-time compilation, report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from typing import Any

from mkc.advice import Asked
from mkc.advice import Retrace
from mkc.advice import advised
from mkc.advice import smallest_topology
from mkc.codegen_pallas.aot import AotResult
from mkc.codegen_pallas.aot import compile_ahead
from mkc.codegen_pallas.aot_phases import phase_machine_code
from mkc.codegen_pallas.source import kernel_source
from mkc.errors import AheadOfTimeError
from mkc.errors import BatchError
from mkc.errors import DeviceCountError
from mkc.errors import HbmError
from mkc.errors import LintError
from mkc.errors import PassSpecError
from mkc.errors import ProofError
from mkc.errors import RoundsError
from mkc.errors import ShardingError
from mkc.errors import TileError
from mkc.errors import VmemError
from mkc.ir.graph import Graph
from mkc.ir.routing import Routing
from mkc.ir.text import print_graph
from mkc.ir.token_masks import with_token_masks
from mkc.ir.verify import verify
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.passes.pipeline import Prepared
from mkc.passes.steps import is_round
from mkc.report import plan_document
from mkc.report import rank_bytes
from mkc.report import report_document
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.lint import lint_program
from mkc.schedule.lint import lint_source
from mkc.schedule.program import Program
from mkc.schedule.program_text import print_program
from mkc.schedule.simulate import PhaseCycles
from mkc.schedule.simulate import Prediction
from mkc.schedule.simulate import predict
from mkc.schedule.verify import Proof
from mkc.schedule.verify import prove
from mkc.targets import Target
from mkc.targets import load_target
from mkc.vmem_trades import any_within_vmem
from mkc.vmem_trades import lower_within_vmem

LARGEST_BATCH = 8  # sequences per kernel: the rows of one f32 tile
TOKEN_BYTES = 4
SMEM_MARGIN = 64 << 10  # scalar memory for everything but the tokens of a launch


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """What to compile.

    Attributes:
      graph: one step of the model, already traced for its batch and context.
      target: `GENERATION` or `GENERATION:TOPOLOGY`; a generation alone takes the smallest topology
        that holds the model.
      tp: ranks; None takes all devices of the topology.
      passes: options of the passes, as text; empty for the defaults.
      logits: the kernel also returns the logits.
      token_masks: the kernel also reads which tokens each sequence may emit.
      rounds_per_launch: decode steps one launch may run.
      aot: compile ahead of time with the TPU compiler.
      phase_times: with `aot`, compile once more, beside it, to predict phases from machine code.
      retrace: the same model for another batch and context, to try what fits; None tries less.
      prompts: graph that reads prompts into the same states, None for `graph` itself.
    """

    graph: Graph
    target: str
    tp: int | None = None
    passes: str = ""
    logits: bool = False
    token_masks: bool = False
    rounds_per_launch: int = 1
    aot: bool = True
    phase_times: bool = False
    retrace: Retrace | None = None
    prompts: Graph | None = None


@dataclass(frozen=True, kw_only=True)
class CompileResult:
    """Everything that compilation made.

    Attributes:
      graph: what the passes were given.
      proof: of the program, for all ranks; it holds.
      report, plan: JSON documents; `docs/report.md` lists the keys.
      kernel_source: text of `kernel.py`.
    """

    graph: Graph
    lowered: Lowered
    target: Target
    proof: Proof
    report: Mapping[str, Any]
    plan: Mapping[str, Any]
    kernel_source: str
    graph_text: str
    program_text: str


def compile_graph(request: CompileRequest) -> CompileResult:
    """Compiles a graph.

    Raises:
      MkcError: the graph, the mesh, the memory or the TPU compiler does not allow it.
    """
    start = time.perf_counter()
    if request.token_masks:
        request = _masked(request)
    graph = request.graph
    if not 1 <= graph.batch <= LARGEST_BATCH:
        raise BatchError(batch=graph.batch, limit=LARGEST_BATCH)
    verify(graph)
    target = choose_topology(graph, request.target, request.tp)
    built = _build(request, target, reserve_bytes=0)
    passes_seconds = time.perf_counter() - start
    built, aot, cycles, proof = _checked(request, target, built)
    lowered = built.lowered
    predicted = predict(lowered.program, target, cycles=cycles)
    alike = _predict_alike(lowered.program, target, cycles)
    seconds = {"passes": passes_seconds, "aot": aot.seconds if aot else 0.0}
    plan = plan_document(lowered, target, cycles=cycles)
    return CompileResult(
        graph=graph,
        lowered=lowered,
        target=target,
        proof=proof,
        report=report_document(
            lowered,
            target,
            aot,
            seconds,
            predicted=predicted,
            alike=alike,
            proof=proof,
            plan=plan,
            prompts=request.prompts,
        ),
        plan=plan,
        kernel_source=built.source,
        graph_text=print_graph(graph),
        program_text=print_program(lowered.program),
    )


def _predict_alike(
    program: Program, target: Target, cycles: Mapping[str, PhaseCycles]
) -> Prediction | None:
    """For rows that choose the same experts; None where that is what any rows do."""
    if not program.experts or program.rows == 1:
        return None
    return predict(program, target, cycles=cycles, routing=Routing.ALIKE)


def _masked(request: CompileRequest) -> CompileRequest:
    """The request for a graph that reads masks of tokens."""
    retrace = request.retrace
    return replace(
        request,
        graph=with_token_masks(request.graph),
        retrace=(lambda *sizes: with_token_masks(retrace(*sizes))) if retrace else None,
        token_masks=False,
    )


def lower_graph(
    graph: Graph,
    target: Target,
    *,
    tp: int | None = None,
    passes: str = "",
    logits: bool = False,
    rounds_per_launch: int = 1,
    retrace: Retrace | None = None,
) -> Lowered:
    """Runs the passes for a target with a topology; arguments as in `CompileRequest`.

    Raises:
      MkcError: the mesh, the memory or an option does not allow it.
    """
    assert target.topology is not None, "the topology is chosen before the passes run"
    ranks = target.topology.devices if tp is None else tp
    # A round of a scheme reports its tokens, and for each sequence how many, and how many drafts.
    scalars = graph.rows + (2 * graph.batch if is_round(graph) else 0)
    largest = (target.smem.usable_bytes - SMEM_MARGIN) // (scalars * TOKEN_BYTES)
    if not 1 <= rounds_per_launch <= largest:
        raise RoundsError(rounds=rounds_per_launch, batch=graph.batch, limit=largest)
    lower = Lower(logits=logits, rounds=rounds_per_launch)
    defaults = Pipeline(shard=Shard(ranks=max(ranks, 1)), lower=lower)
    pipeline = defaults.override(passes)
    _check_options(pipeline, defaults, passes, target)
    try:
        if not 1 <= ranks <= target.topology.devices:
            raise DeviceCountError(tp=ranks, target=target.name, devices=target.topology.devices)
        return _lowered(graph, target, pipeline, choose=lower_within_vmem)
    except (DeviceCountError, HbmError, ShardingError, TileError, VmemError) as error:
        asked = Asked(
            graph=graph,
            target=target,
            names_tp=tp is not None,
            pipeline=pipeline,
            defaults=defaults,
            attempt=_attempt,
            retrace=retrace,
        )
        raise advised(error, asked) from None


def _lowered(
    graph: Graph,
    target: Target,
    pipeline: Pipeline,
    *,
    choose: Callable[[Pipeline, Prepared, Target], Lowered],
) -> Lowered:
    """Lowers a graph whose parts fit the memory of a device."""
    ranks = pipeline.shard.ranks
    _check_hbm(target, *_held_bytes(graph, ranks, target))  # A hopeless size ends here.
    lowered = choose(pipeline, pipeline.prepare(graph, target), target)
    _check_hbm(target, *rank_bytes(lowered.program))
    return lowered


_attempt = partial(_lowered, choose=any_within_vmem)


def _check_options(pipeline: Pipeline, defaults: Pipeline, text: str, target: Target) -> None:
    """Raises `PassSpecError` for what other options decide, and for what this target cannot do."""
    decided = (
        ("shard", "ranks", "--tp"),
        ("lower", "logits", "--logits"),
        ("lower", "rounds", "--rounds-per-launch"),
    )
    for name, option, flag in decided:
        given = getattr(getattr(pipeline, name), option)
        if given != getattr(getattr(defaults, name), option):
            problem = f"{option} of pass '{name}' is {given}, but {flag} decides it"
            raise PassSpecError(text=text, problem=problem)
    reserve = pipeline.residency.reserve_bytes
    if reserve >= target.vmem.usable_bytes:
        problem = (
            f"reserve_bytes {reserve} leaves the kernel nothing of the {target.vmem.usable_bytes} "
            f"bytes of VMEM"
        )
        raise PassSpecError(text=text, problem=problem)


def _check_hbm(target: Target, weights: int, states: int) -> None:
    if weights + states > target.hbm.usable_bytes:
        raise HbmError(
            target=target.name,
            weight_bytes=weights,
            state_bytes=states,
            limit_bytes=target.hbm.usable_bytes,
        )


def _held_bytes(graph: Graph, ranks: int, target: Target) -> tuple[int, int]:
    """Weights and states of one rank, without padding."""
    local = Shard(ranks=ranks).apply(graph, DecisionLog(), target=target).graph
    weights = sum(one.type.bytes * one.instances for one in local.params.values())
    states = sum(one.type.bytes * one.instances * local.batch for one in local.states.values())
    return weights, states


def choose_topology(graph: Graph, name: str, tp: int | None) -> Target:
    """The named topology, or the smallest one of the generation that holds the model.

    Raises:
      UnknownTargetError: no such target.
    """
    target = load_target(name)
    if target.topology is not None:
        return target
    if tp is not None:
        found = next((one for one in target.topologies if one.devices >= tp), None)
    else:
        found = smallest_topology(graph, target, Pipeline(shard=Shard(ranks=1)), _attempt)
    return load_target((found or target.topologies[-1]).full_name)


@dataclass(frozen=True, kw_only=True)
class _Built:
    """A program and its source."""

    lowered: Lowered
    source: str


def _build(request: CompileRequest, target: Target, *, reserve_bytes: int) -> _Built:
    passes = request.passes
    if reserve_bytes:
        passes = ",".join(filter(None, (passes, f"residency{{reserve_bytes={reserve_bytes}}}")))
    lowered = lower_graph(
        request.graph,
        target,
        tp=request.tp,
        passes=passes,
        logits=request.logits,
        rounds_per_launch=request.rounds_per_launch,
        retrace=request.retrace,
    )
    source = kernel_source(lowered.program, lowered.steps, target=target)
    return _Built(lowered=lowered, source=source)


def _checked(
    request: CompileRequest, target: Target, built: _Built
) -> tuple[_Built, AotResult | None, Mapping[str, PhaseCycles], Proof]:
    """Lint, the proof, and what is wanted of the compiler, which works beside it elsewhere."""
    _lint(built, target)
    with ThreadPoolExecutor(2) as beside:
        ahead = beside.submit(_compile_ahead, built.source, target) if request.aot else None
        phases = (
            beside.submit(_phase_code, built.source, target) if _wants_phases(request) else None
        )
        proof = _prove(built, target)
        aot = ahead.result() if ahead is not None else None
        cycles = phases.result() if phases is not None else {}
    if aot is None or aot.ok:
        return built, aot, cycles, proof
    built, aot = _with_more_reserve(request, target, built, aot)
    cycles = _phase_code(built.source, target) if _wants_phases(request) else {}
    _lint(built, target)
    return built, aot, cycles, _prove(built, target)


def _lint(built: _Built, target: Target) -> None:
    program = built.lowered.program
    found = [*lint_program(program, target), *lint_source(built.source)]
    if found:
        raise LintError(model=program.name, issue=str(found[0]), count=len(found))


def _prove(built: _Built, target: Target) -> Proof:
    program = built.lowered.program
    proof = prove([program] * program.ranks, target)
    if not proof.ok:
        raise ProofError(model=program.name, issue=str(proof.issues[0]), count=len(proof.issues))
    return proof


def _wants_phases(request: CompileRequest) -> bool:
    return request.aot and request.phase_times


def _phase_code(source: str, target: Target) -> Mapping[str, PhaseCycles]:
    assert target.topology is not None
    return phase_machine_code(source, topology=target.topology.full_name)


def _compile_ahead(source: str, target: Target) -> AotResult:
    """Raises `AheadOfTimeError` unless the compiler accepts or only lacks VMEM for its scratch."""
    assert target.topology is not None
    result = compile_ahead(source, topology=target.topology.full_name)
    if not result.ok and not missing_vmem(result.error or ""):
        raise AheadOfTimeError(target=target.name, message=result.error or "no message")
    return result


def _with_more_reserve(
    request: CompileRequest, target: Target, built: _Built, refused: AotResult
) -> tuple[_Built, AotResult]:
    """Plans again with less, by what the compiler said it lacks for its own scratch.

    How much the compiler spills is known only to itself; wide vector phases need more than the
    target's usual reserve.
    """
    planned = built.lowered.residency.vmem_bytes
    allowed = planned - missing_vmem(refused.error or "") - RESERVE_STEP
    if allowed <= 0:
        raise AheadOfTimeError(target=target.name, message=refused.error or "no message")
    built = _build(request, target, reserve_bytes=target.vmem.usable_bytes - allowed)
    result = _compile_ahead(built.source, target)
    if not result.ok:
        raise AheadOfTimeError(target=target.name, message=result.error or "no message")
    return built, replace(result, seconds=refused.seconds + result.seconds)


RESERVE_STEP = 1 << 20
EXCEEDED = re.compile(r"Exceeded vmem capacity by ([\d.]+)([KMG])")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def missing_vmem(error: str) -> int:
    """Bytes by which the TPU compiler exceeded VMEM, 0 when that was not its complaint."""
    match = EXCEEDED.search(error)
    return int(float(match.group(1)) * UNITS[match.group(2)]) if match else 0
