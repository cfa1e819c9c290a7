"""Lint of a program: the shapes of its arrays, copies and messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mkc.ir.types import DType
from mkc.schedule.lint.rules import issue
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import masks_of
from mkc.schedule.verify.arrays import SAMPLING_ROLES
from mkc.schedule.verify.arrays import SCALAR_ROLES
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.issue import Issue
from mkc.targets import Target

WORD_BYTES = 4  # an element of a vector register
MORE_ROUNDS = 2  # that repeat the last kind: one behind it, and the last round of the launch


def lint_program(program: Program, target: Target) -> list[Issue]:
    """Everything about a program that a chip would refuse or get wrong."""
    found = [*_arrays(program, target), *_operands(program)]
    arrays = arrays_of(program)
    seen: set[tuple[object, ...]] = set()
    step = target.core.lanes  # a multiple of every step that a place is asked for
    for event in expected_events(program, 0, few_rounds(cases_of(program)[0])):
        if isinstance(event, Start | Send):
            source, goal = event.source, event.target
            ends = [(one.array, one.first % step, one.count) for one in (source, goal)]
            key = (event.phase, *ends)
            if key not in seen:
                seen.add(key)
                found += _copy(event, arrays, target)
    return list(dict.fromkeys(found))


def few_rounds(case: Case) -> Case:
    """Every kind of round, and two more: the copies of those between have the same shapes."""
    rounds = min(case.rounds, len(case.positions) + MORE_ROUNDS)
    return replace(case, rounds=rounds, ran=min(case.ran, rounds))


def _arrays(program: Program, target: Target) -> Iterator[Issue]:
    for buffer in program.buffers:
        if buffer.shape[0] % target.core.sublanes:
            yield issue("L105", buffer.name, f"{buffer.name} has {buffer.shape[0]} rows")


def _operands(program: Program) -> Iterator[Issue]:
    used = {"tape", *(one.array for one in program.streams)}
    used |= {name for one in program.experts for name in (one.gate_up_array, one.down_array)}
    used |= {name for one in program.caches for name in (one.key_array, one.value_array)}
    used |= {one.target for one in program.round.rows} if program.round is not None else set()
    for phase in program.phases():
        if isinstance(phase, EmbedPhase):
            used.add(phase.table)
        elif isinstance(phase, SelectorWalkPhase):
            used |= {phase.predecessor, phase.successor}
        elif isinstance(phase, MarkovWalkPhase):
            used.add(phase.predecessor)
        elif masks := masks_of(phase):
            used.add(masks)
    for operand in program.operands:
        if operand.name not in used and operand.role not in SCALAR_ROLES:
            yield issue("L106", operand.name, f"no phase uses the operand {operand.name}")
        is_number = operand.role in SCALAR_ROLES - SAMPLING_ROLES
        if is_number and operand.dtype is not DType.I32:
            yield issue("L107", operand.name, f"{operand.name} is {operand.dtype}")


def _copy(event: Start | Send, arrays: dict[str, Array], target: Target) -> Iterator[Issue]:
    sides = [(place, arrays[place.array]) for place in (event.source, event.target)]
    for place, array in sides:
        yield from _part(event.phase, place, array, target)
    size = event.source.count * sides[0][1].unit_bytes
    if size < target.core.lanes * WORD_BYTES:
        yield issue("L104", event.phase, f"{size} bytes of {event.source} are copied")
    rows, lanes, array = _moved(event.source, sides[0][1])
    tile = target.tile_rows[array.dtype.bytes]
    if isinstance(event, Send):
        one_row = rows == 1 and array.dtype.bytes == WORD_BYTES
        half_tile = array.dtype is DType.BF16 and rows % target.core.sublanes == 0
        if lanes % target.core.lanes or not (one_row or half_tile or rows % tile == 0):
            message = f"a message of {rows} rows and {lanes} lanes of {array.dtype}"
            yield issue("L103", event.phase, message)
    elif all(array.on_chip for _, array in sides) and rows % tile:
        yield issue("L108", event.phase, f"{rows} rows are copied inside VMEM")


def _part(phase: str, place: Place, array: Array, target: Target) -> Iterator[Issue]:
    """A part of a block: rows must be whole tiles, lanes whole registers."""
    if array.units == 1 or (place.first == 0 and place.count == array.units):
        return
    last = array.axis == len(array.shape) - 1
    step = target.core.lanes if last else target.tile_rows[array.dtype.bytes]
    if array.axis < len(array.shape) - 2:
        return
    if place.first % step or place.count % step:
        code, what = ("L102", "lanes") if last else ("L101", "rows")
        yield issue(code, phase, f"{place} is no multiple of {step} {what}")


def _moved(place: Place, array: Array) -> tuple[int, int, Array]:
    """Rows and lanes of what is moved."""
    rows, lanes = array.shape[-2], array.shape[-1]
    if array.units > 1 and array.axis == len(array.shape) - 1:
        lanes = place.count
    elif array.units > 1 and array.axis == len(array.shape) - 2:
        rows = place.count
    return rows, lanes, array
