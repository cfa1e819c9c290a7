"""A program as text, for reading and golden files: operands, buffers, streams, phases in order."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Piece
from mkc.schedule.program import Product
from mkc.schedule.program import Program
from mkc.schedule.program import TileRun
from mkc.schedule.program import View
from mkc.schedule.round_phases import Remembered
from mkc.schedule.round_phases import SampledAccept
from mkc.schedule.round_phases import SampledWalk
from mkc.schedule.scalars import Carried
from mkc.schedule.scalars import CarriedRows

INDENT = "  "


def print_program(program: Program) -> str:
    """The whole program."""
    lines = [
        f'program "{program.name}" scheme={program.scheme} ranks={program.ranks} '
        f"batch={program.batch} rows={program.rows} context={program.context} "
        f"rounds={program.rounds_per_launch}"
    ]
    for one in program.operands:
        updated = " updated" if one.updated else ""
        lines.append(f"operand {one.name} {one.role} {one.dtype}{list(one.shape)}{updated}")
    for buffer in program.buffers:
        lines.append(
            f"buffer {buffer.name} {buffer.dtype}{list(buffer.shape)} in {buffer.region} "
            f"live {buffer.first}..{buffer.last}"
        )
    tables = (
        program.scalars,
        program.streams,
        program.caches,
        program.experts,
        program.expert_rings,
        program.exchanges,
    )
    for table in tables:
        lines += [f"{type(one).__name__} {_fields(one)}" for one in table]
    if program.round is not None:
        lines.append(f"round {_fields(program.round)}")
    lines.append(f"tape {_fields(program.tape)}")
    lines += _body(program.body, "")
    return "\n".join(lines) + "\n"


def _body(body: tuple[Phase | Loop, ...], indent: str) -> list[str]:
    lines = []
    for item in body:
        if isinstance(item, Loop):
            lines.append(f"{indent}loop {item.name} x {item.count} {{")
            lines += _body(item.body, indent + INDENT)
            lines.append(f"{indent}}}")
        else:
            lines.append(f"{indent}{item.id} {type(item).__name__} {_fields(item, skip=SKIP)}")
    return lines


SKIP = ("id", "title", "location")
OF_ROUNDS = (
    "also",
    "scalars",
    "window",
    "anchored",
    "sampling",
    "forced",
    "rows",
)  # left out where a phase or stream has none


def _fields(record: Any, skip: tuple[str, ...] = ()) -> str:
    return " ".join(
        f"{part.name}={_text(getattr(record, part.name))}"
        for part in fields(record)
        if part.name not in skip and (part.name not in OF_ROUNDS or getattr(record, part.name))
    )


def _text(value: Any) -> str:
    match value:
        case View():
            return f"{value.buffer}[{value.start}:{value.start + value.width}]"
        case Piece():
            return f"{value.param}@{value.column}:{value.column + value.width}"
        case TileRun():
            refills = " ".join(_text(guards) for guards in value.refill)
            return f"{value.first}..{value.first + value.count} refill {refills}"
        case Product():
            return f"{_text(value.left)} -> {_text(value.output)}"
        case Remembered():
            return f"{_text(value.k)} {_text(value.v)} at {value.positions}"
        case SampledAccept() | SampledWalk():
            return f"({_fields(value)})"
        case CarriedRows():
            return f"{_text(value.source)} -> {value.target}"
        case Carried():
            return f"{value.source} -> {value.target}"
        case Guard():
            ended = "".join(f" after {name}" for name in value.ended)
            again = f" while {value.loop}" if value.loop else ""
            return f"{value.rows}{ended}{again}"
        case Node():
            results = ", ".join(f"%{one.name}" for one in value.results)
            return f"{results} = {value.op.mnemonic}({', '.join(value.operands)})"
        case Location():
            return str(value)
        case tuple():
            return f"({', '.join(_text(one) for one in value)})"
        case dict():
            inside = ", ".join(f"{key}: {_text(one)}" for key, one in value.items())
            return f"{{{inside}}}"
        case _:
            return str(value)
