"""The source of sums and gathers over ranks, whole or in two parts; see `phases`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import Part
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.program import AllReducePhase
from mkc.schedule.round_phases import AllGatherPhase

if TYPE_CHECKING:
    from mkc.codegen_pallas.phases import PhaseWriter

# What the first part of a sum needs of the buffers, and what needs nothing but it.
STARTS = {"two_level": ("send", "scattered"), "two_step": ("staged", "send", "receive")}
STAGED = "staged"


def all_reduce_lines(writer: PhaseWriter, phase: AllReducePhase) -> list[str]:
    """The body of the phase function, without its header."""
    plan = _plan(writer, phase.exchange)
    write = {"one_shot": _one_shot, "two_phase": _two_phase}.get(phase.algorithm, _in_groups)
    lines, total = write(writer, phase, plan)
    if phase.part is Part.START:
        return [*lines, "return c"]
    return [*lines, writer.store(phase.output, total), *writer.meeting(phase.meets), "return c"]


def all_gather_lines(writer: PhaseWriter, phase: AllGatherPhase) -> list[str]:
    """The body of the phase function, without its header."""
    one_row = _plan(writer, phase.exchange).rows == 1
    loads = [f"{writer.load(one)}{'[0:1]' if one_row else ''}," for one in phase.parts]
    widths = [f"{one.width}," for one in phase.parts]
    what = widths if phase.part is Part.FINISH else loads
    call = [
        f"support.all_gather{_suffix(phase.part)}(",
        f"    ({' '.join(what)}),",
        *writer.exchange_arguments(phase.exchange),
        ")",
    ]
    if phase.part is Part.START:
        return [*call, "return c"]
    names = [f"gathered_{number}" for number, _ in enumerate(phase.parts)]
    if len(names) == 1:
        names = ["gathered"]
    values = [
        f"jnp.broadcast_to({name}, (ROWS, {output.width}))" if one_row else name
        for name, output in zip(names, phase.outputs, strict=True)
    ]
    call[0] = f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call[0]}"
    return [
        *call,
        *(writer.store(*pair) for pair in zip(phase.outputs, values, strict=True)),
        *writer.meeting(phase.meets),
        "return c",
    ]


def _plan(writer: PhaseWriter, exchange: str) -> ExchangePlan:
    return next(one for one in writer.program.exchanges if one.name == exchange)


def _suffix(part: Part) -> str:
    return "" if part is Part.WHOLE else f"_{part}"


def _call(phase: AllReducePhase) -> str:
    call = f"support.all_reduce_{phase.algorithm}{_suffix(phase.part)}("
    return call if phase.part is Part.START else f"total = {call}"


def _summand(phase: AllReducePhase, plan: ExchangePlan) -> str:
    """What is added up; the second part of an exchange is told only how wide that was."""
    if phase.part is Part.FINISH:
        return f"    {phase.partial.width},"
    lanes = f"{phase.partial.start}:{phase.partial.start + phase.partial.width}"
    return f"    m.{phase.partial.buffer}[0:{plan.rows}, {lanes}],"


def _one_shot(
    writer: PhaseWriter, phase: AllReducePhase, plan: ExchangePlan
) -> tuple[list[str], str]:
    lines = [
        _call(phase),
        _summand(phase, plan),
        *writer.exchange_arguments(plan.name),
        *_own_shares(phase),
        ")",
    ]
    total = "support.round_bf16(total)" if phase.rounds else "total"
    return lines, f"jnp.broadcast_to({total}, (ROWS, {phase.output.width}))"


def _own_shares(phase: AllReducePhase) -> list[str]:
    """Which columns a rank wants of those that are scattered; the start sends all of them."""
    if not phase.scattered or phase.part is Part.START:
        return []
    return [f"    group={phase.group},", f"    own={phase.scattered},"]


def _in_groups(
    writer: PhaseWriter, phase: AllReducePhase, plan: ExchangePlan
) -> tuple[list[str], str]:
    """Two levels or two steps."""
    buffers = [suffix for suffix, *_ in exchange_buffers(plan, writer.program.ranks)]
    ranks = ["    ranks=RANKS,"]
    if phase.part is Part.START:
        buffers, ranks = list(STARTS[phase.algorithm]), []
    elif phase.part is Part.FINISH:
        buffers = [one for one in buffers if one != STAGED]
    lines = [
        _call(phase),
        _summand(phase, plan),
        *(f"    {one}=m.{plan.name}_{one}," for one in (*buffers, "sems")),
        *ranks,
        f"    group={plan.group},",
        *([f"    own={phase.scattered},"] if phase.scattered else []),
        ")",
    ]
    total = "support.round_bf16(total)" if phase.rounds and not plan.rounds else "total"
    return lines, f"jnp.broadcast_to({total}, (ROWS, {phase.output.width}))"


def _two_phase(
    writer: PhaseWriter, phase: AllReducePhase, plan: ExchangePlan
) -> tuple[list[str], str]:
    name, buffer = plan.name, phase.partial.buffer
    behind = phase.partial.start + phase.partial.width
    end = phase.partial.start + plan.columns
    zeros = f"jnp.zeros((ROWS, {end - behind}), jnp.float32)"
    padding = [f"m.{buffer}[:, {behind}:{end}] = {zeros}"] if end > behind else []
    arguments = {
        "scattered": "scattered",
        "send": "send",
        "gathered": "gathered",
        "scatter_send_sem": "sems.at[0]",
        "scatter_receive_sem": "sems.at[1]",
        "gather_send_sem": "sems.at[2]",
        "gather_receive_sem": "sems.at[3]",
    }
    if plan.wire is not DType.F32:
        arguments = {"parts": "parts", **arguments}
    if phase.part is Part.START:
        second = ("send", "gathered", "gather_send_sem", "gather_receive_sem")
        arguments = {key: value for key, value in arguments.items() if key not in second}
    lines = [
        *(padding if phase.part is not Part.FINISH else []),
        _call(phase),
        f"    m.{buffer}.at[:, {phase.partial.start}:{end}],",
        *(f"    {key}=m.{name}_{value}," for key, value in arguments.items()),
        "    ranks=RANKS,",
        ")",
    ]
    return lines, "total" if end == behind else f"total[:, 0:{phase.output.width}]"
