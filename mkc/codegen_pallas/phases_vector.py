"""The source of vector phases: chains of operations on arrays in registers."""

from __future__ import annotations

import re
from keyword import iskeyword
from typing import TYPE_CHECKING
from typing import Any

from mkc.codegen_pallas import emit
from mkc.codegen_pallas import emit_mixing as emit_mixing  # registers EMIT facets
from mkc.codegen_pallas import emit_rounds as emit_rounds
from mkc.errors import UnsupportedOpError
from mkc.ir import ops
from mkc.ir import ops_spec
from mkc.ir.facets import EMIT
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.passes.mixing_parts import MixStored
from mkc.passes.streams import rotary_frequencies
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.stream_plans import PageRow

if TYPE_CHECKING:
    from mkc.codegen_pallas.phases import PhaseWriter

MIXTURES = (MixBlocks, MixStored)
BLOCKS_IN_PLACE = 2  # operands of a mixture that are read where they lie
CONVOLUTIONS = (ops.CausalConv, ops_spec.KeptConv, ops_spec.DynamicConv)


def vector_lines(writer: PhaseWriter, phase: VectorPhase) -> list[str]:
    """The body of the phase function, without its header."""
    return _VectorWriter(writer).lines(phase)


class _VectorWriter:
    """Writes one vector phase."""

    def __init__(self, writer: PhaseWriter) -> None:
        self.writer = writer

    def lines(self, phase: VectorPhase) -> list[str]:
        lines = []
        streams = list(dict.fromkeys(phase.states.values()))
        lines += [f"support.stream_wait(m.{name}, c.{name})" for name in streams]
        if phase.page:
            lines.append(f"page, slot = m.{phase.page}.ring, c.{phase.page}.slot")
        names: dict[str, str] = {}
        place = phase.location
        for node in phase.nodes:
            if node.location != place:
                place = node.location
                lines.append(f"# {place}")
            lines += self._node(phase, node, names)
        for value, view in phase.writes.items():
            code = names[value]
            if self.writer.types[value].rank == 1:
                code = f"jnp.broadcast_to({code}, (ROWS, {view.width}))"
            lines.append(self.writer.store(view, code))
        for name in streams:
            lines.append(f"c = c._replace({name}=support.stream_advance(m.{name}, c.{name}))")
        return [*lines, "return c"]

    def _node(self, phase: VectorPhase, node: Node, names: dict[str, str]) -> list[str]:
        facet = EMIT.find(node.op)
        if facet is None:
            raise UnsupportedOpError(op=node.op.mnemonic, facet="emission", location=node.location)
        lines: list[str] = []
        operands = tuple(
            emit.Operand(code=self._operand(phase, node, name, names, lines), type=self._type(name))
            for name in node.operands
        )
        context = emit.EmitContext(
            results=tuple(value.type for value in node.results),
            positions=f"m.{phase.scalars.get('positions', 'positions')}",
            rows=self.writer.rows,
            states=tuple(
                (f"m.{phase.states[key]}", f"c.{phase.states[key]}") for key in node.states
            ),
            constant=self._constant(phase, node, names, lines),
            taps=self._taps(phase, node, names, lines),
        )
        found = facet(node.op, operands, context)
        for value in node.results:
            names[value.name] = python_identifier(value.name)
        if len(found) < len(node.results):
            (pair,) = found
            together = ", ".join(names[value.name] for value in node.results)
            lines.append(f"{together} = {pair.code}")
            found = tuple(
                emit.Emitted(code=names[value.name], exact=pair.exact) for value in node.results
            )
        for value, emitted in zip(node.results, found, strict=True):
            rounds = value.type.dtype is DType.BF16 and not emitted.exact
            code = f"support.round_bf16({emitted.code})" if rounds else emitted.code
            if code != names[value.name]:
                lines.append(f"{names[value.name]} = {code}")
        return lines

    def _operand(
        self,
        phase: VectorPhase,
        node: Node,
        name: str,
        names: dict[str, str],
        lines: list[str],
    ) -> str:
        """Expression of an operand; a value from a buffer is loaded once per phase."""
        if name in names:
            return names[name]
        if name in self.writer.graph.params:
            if isinstance(node.op, CONVOLUTIONS):
                return ""
            index = (0,) * (self._type(name).rank - 1)
            return self._vector(self._row(phase.page, param=name, index=index), names, lines)
        if name in phase.scalars:
            return f"m.{phase.scalars[name]}"
        if isinstance(node.op, MIXTURES) and name in node.operands[:BLOCKS_IN_PLACE]:
            return self.writer.view(self._view(phase, name))
        if name in {value.name for value in self.writer.graph.inputs}:
            return f"m.{name}"
        alias = self.writer.steps.resolve(name)
        if alias.base in names:
            code = f"{names[alias.base]}[:, {alias.start}:{alias.start + alias.width}]"
        else:
            code = self.writer.load(self._view(phase, name))
        names[name] = python_identifier(name)
        lines.append(f"{names[name]} = {code}")
        return names[name]

    def _view(self, phase: VectorPhase, name: str) -> View:
        """Where a value lies that is in no register."""
        alias = self.writer.steps.resolve(name)
        base = phase.reads[alias.base]
        return View(buffer=base.buffer, start=base.start + alias.start, width=alias.width)

    def _type(self, name: str) -> TensorType:
        return (
            self.writer.graph.params[name].type
            if name in self.writer.graph.params
            else self.writer.types[name]
        )

    def _row(
        self, page: str, *, param: str, tap: int | None = None, index: tuple[int, ...] = ()
    ) -> PageRow:
        return next(
            row
            for row in self.writer.program.pages[page]
            if (row.param, row.tap, row.index) == (param, tap, index)
        )

    def _vector(self, row: PageRow, names: dict[str, str], lines: list[str]) -> str:
        """A variable that holds the vector, loaded once per phase."""
        key = f"row {row.row}"
        if key not in names:
            name = vector_name(row)
            if name in names.values():  # the parameters' own names are equal
                name = f"{name}_row_{row.row}"
            names[key] = name
            lines.append(f"{name} = support.vector(page, slot, {row.row}, {row.length})")
        return names[key]

    def _constant(
        self, phase: VectorPhase, node: Node, names: dict[str, str], lines: list[str]
    ) -> str | None:
        if not isinstance(node.op, ops.RotaryTable):
            return None
        wanted = rotary_frequencies(node.op)
        rows = self.writer.program.pages[phase.page]
        return self._vector(next(row for row in rows if row.constant == wanted), names, lines)

    def _taps(
        self, phase: VectorPhase, node: Node, names: dict[str, str], lines: list[str]
    ) -> tuple[str, ...]:
        """The vectors of a convolution's weight."""
        match node.op:
            case ops.CausalConv() | ops_spec.KeptConv():
                key = node.operands[1]
                rows = [self._row(phase.page, param=key, tap=tap) for tap in range(node.op.taps)]
            case ops_spec.DynamicConv():
                key = node.operands[2]
                taps = self.writer.graph.params[key].type.shape[1]
                rows = [
                    self._row(phase.page, param=key, index=(node.op.side, tap))
                    for tap in range(taps)
                ]
            case _:
                return ()
        return tuple(self._vector(row, names, lines) for row in rows)


def value_types(graph: Graph) -> dict[str, TensorType]:
    """Types of all values of a graph, carried ones included."""
    types = {value.name: value.type for value in graph.inputs}

    def visit(block: Any) -> None:
        for item in block.items:
            if isinstance(item, Node):
                types.update({value.name: value.type for value in item.results})
            else:
                for carry in item.carries:
                    types[carry.argument.name] = carry.argument.type
                    types[carry.result.name] = carry.result.type
                visit(item.body)

    visit(graph.body)
    return types


def vector_name(row: PageRow) -> str:
    """A variable for a small vector: `w_` and the parameter's own name, or `constant_ROW`."""
    if not row.param:
        return f"constant_{row.row}"
    numbers = row.index if row.tap is None else (row.tap,)
    return "_".join([f"w_{param_word(row.param)}", *(str(one) for one in numbers)])


def param_word(key: str) -> str:
    """A parameter's own name: the last word of its key that says something."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", key) if not word.isdigit()]
    return next(word for word in reversed(words) if word and word != "weight")


# Names that a phase function uses for other things than values of the graph.
TAKEN = ("c", "constant", "functools", "jnp", "last", "lax", "m", "page", "slot", "support", "w")


def python_identifier(name: str) -> str:
    """A value's name as a Python variable that hides nothing else."""
    text = re.sub(r"\W+", "_", name).strip("_")
    if iskeyword(text) or text.split("_")[0] in TAKEN or not text[:1].isalpha():
        return f"value_{text}"
    return text
