"""The source of every phase: one function of the generated kernel each.

A phase function takes the memory `m`, the cursors `c` and, where a refill depends on it, which
loops are in their last iteration; it returns the cursors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

from mkc.codegen_pallas import emit
from mkc.errors import UnsupportedOpError
from mkc.ir import ops
from mkc.ir.facets import EMIT
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.passes.steps import StepGraph
from mkc.passes.streams import rotary_frequencies
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import Buffer
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Guard
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import PageRow
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import TileRun
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View

INDENT = "    "


class PhaseWriter:
    """Writes the phases of one program.

    Attributes:
      program: what is written.
      graph: the graph of one rank, for the types of values.
    """

    def __init__(self, program: Program, steps: StepGraph) -> None:
        self.program = program
        self.steps = steps
        self.graph: Graph = steps.sharded.graph
        self.buffers: dict[str, Buffer] = {one.name: one for one in program.buffers}
        self.types = _value_types(self.graph)

    def lines(self, phase: Phase) -> list[str]:
        """The body of the phase function, without its header."""
        writers: dict[type[Phase], Callable[[Any], list[str]]] = {
            EmbedPhase: self.embed,
            MatmulPhase: self.matmul,
            NarrowMatmulPhase: self.narrow,
            VectorPhase: self.vector,
            DeltaRulePhase: self.delta_rule,
            AttentionPhase: self.attention,
            AllReducePhase: self.all_reduce,
            ArgmaxPhase: self.argmax,
        }
        return writers[type(phase)](phase)

    def slice(self, view: View) -> str:
        """`m.buffer[:, a:b]`."""
        return f"m.{view.buffer}[:, {view.start}:{view.start + view.width}]"

    def load(self, view: View) -> str:
        """The view as f32."""
        cast = ".astype(jnp.float32)" if self.buffers[view.buffer].dtype is DType.BF16 else ""
        return f"{self.slice(view)}{cast}"

    def store(self, view: View, value: str) -> str:
        """Assigns `value`, cast to the buffer's dtype."""
        cast = ".astype(jnp.bfloat16)" if self.buffers[view.buffer].dtype is DType.BF16 else ""
        return f"{self.slice(view)} = {value}{cast}"

    def view(self, view: View) -> str:
        """A `support.View` of the buffer."""
        return f"support.View(ref=m.{view.buffer}, start={view.start}, width={view.width})"

    def embed(self, phase: EmbedPhase) -> list[str]:
        return [
            "support.embed(",
            f"    table=m.{phase.table},",
            f"    tokens=m.{phase.source},",
            f"    blocks=m.{phase.id}_blocks,",
            f"    sem=m.{phase.id}_sem.at[0],",
            f"    out=m.{phase.output.buffer},",
            "    batch=BATCH,",
            ")",
            "return c",
        ]

    def matmul(self, phase: MatmulPhase) -> list[str]:
        lines: list[str] = []
        sizes = sorted({phase.step_blocks(run.first) for run in phase.runs}, reverse=True)
        for blocks in sizes:
            lines += [f"def {_tile_name(blocks, sizes)}(step, c, refills):"]
            writer = self._chunked_tile if phase.loads_per_step > 1 else self._whole_tile
            lines += [INDENT + line for line in writer(phase, blocks)]
            lines.append("")
        for run in phase.runs:
            lines += self._run(phase, run, _tile_name(phase.step_blocks(run.first), sizes))
        return [*lines, "return c"]

    def _whole_tile(self, phase: MatmulPhase, blocks: int) -> list[str]:
        """One load brings `blocks` whole column blocks."""
        K = phase.K
        lines = [
            f"support.tape_wait(m.tape, c.tape, {K * blocks})",
            f"left = {self._left(phase, 0, K)}",
        ]
        names = [f"block_{index}" for index in range(blocks)]
        for index, name in enumerate(names):
            rows = f"{index * K}:{(index + 1) * K}"
            lines.append(f"weights = m.tape.ring[c.tape.slot, {rows}, :]")
            lines.append(f"{name} = jnp.dot(left, weights, preferred_element_type=jnp.float32)")
        joined = names[0] if blocks == 1 else f"jnp.concatenate([{', '.join(names)}], axis=1)"
        lines += self._store_tile(phase, joined, blocks)
        lines.append("return c._replace(tape=support.refill(m.tape, c.tape, refills[0]))")
        return lines

    def _chunked_tile(self, phase: MatmulPhase, blocks: int) -> list[str]:
        """Several loads bring one column block."""
        rows = phase.K // phase.loads_per_step
        lines = [f"total = jnp.zeros((ROWS, {TAPE_LANES}), jnp.float32)"]
        for load in range(phase.loads_per_step):
            left = self._left(phase, load * rows, rows)
            lines += [
                f"support.tape_wait(m.tape, c.tape, {rows})",
                f"weights = m.tape.ring[c.tape.slot, 0:{rows}, :]",
                f"total += jnp.dot({left}, weights, preferred_element_type=jnp.float32)",
                f"c = c._replace(tape=support.refill(m.tape, c.tape, refills[{load}]))",
            ]
        return [*lines, *self._store_tile(phase, "total", blocks), "return c"]

    def _left(self, phase: MatmulPhase, start: int, width: int) -> str:
        view = View(buffer=phase.left.buffer, start=phase.left.start + start, width=width)
        cast = "" if self.buffers[view.buffer].dtype is DType.BF16 else ".astype(jnp.bfloat16)"
        return f"{self.slice(view)}{cast}"

    def _store_tile(self, phase: MatmulPhase, value: str, blocks: int) -> list[str]:
        rounded = f"support.round_bf16({value})" if phase.rounds else value
        cast = (
            ".astype(jnp.bfloat16)" if self.buffers[phase.output.buffer].dtype is DType.BF16 else ""
        )
        columns = phase.blocks_per_step * TAPE_LANES
        width = blocks * TAPE_LANES
        at = f"support.lanes({_sum(phase.output.start, f'step * {columns}')}, {width})"
        return [f"m.{phase.output.buffer}[:, {at}] = {rounded}{cast}"]

    def _run(self, phase: MatmulPhase, run: TileRun, tile: str) -> list[str]:
        refills = ", ".join(refill_source(guards) for guards in run.refill)
        call = f"functools.partial({tile}, refills=({refills},))"
        if run.count == 1:
            return [f"c = {tile}({run.first}, c, refills=({refills},))"]
        return [f"c = lax.fori_loop({run.first}, {run.first + run.count}, {call}, c)"]

    def narrow(self, phase: NarrowMatmulPhase) -> list[str]:
        left = self.slice(phase.left).replace("[:", ".at[:", 1)
        result = f"support.narrow_matmul({left}, m.{phase.stream}, c.{phase.stream}, K={phase.K})"
        rounded = f"support.round_bf16({result})" if phase.rounds else result
        return [
            f"result = {rounded}",
            self.store(phase.output, f"result[:, 0:{phase.columns}]"),
            "return c",
        ]

    def vector(self, phase: VectorPhase) -> list[str]:
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
            if self.types[value].rank == 1:
                code = f"jnp.broadcast_to({code}, (ROWS, {view.width}))"
            lines.append(self.store(view, code))
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
            state=self._state(phase, node),
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
        if name in self.graph.params:
            if isinstance(node.op, ops.CausalConv):
                return ""
            return self._vector(self._row(phase.page, param=name), names, lines)
        if name in {value.name for value in self.graph.inputs}:
            return f"m.{name}"
        alias = self.steps.resolve(name)
        if alias.base in names:
            code = f"{names[alias.base]}[:, {alias.start}:{alias.start + alias.width}]"
        else:
            base = phase.reads[alias.base]
            code = self.load(
                View(buffer=base.buffer, start=base.start + alias.start, width=alias.width)
            )
        names[name] = python_identifier(name)
        lines.append(f"{names[name]} = {code}")
        return names[name]

    def _type(self, name: str) -> TensorType:
        return self.graph.params[name].type if name in self.graph.params else self.types[name]

    def _row(self, page: str, *, param: str = "", tap: int | None = None) -> PageRow:
        return next(
            row for row in self.program.pages[page] if row.param == param and row.tap == tap
        )

    def _vector(self, row: PageRow, names: dict[str, str], lines: list[str]) -> str:
        """A variable that holds the vector, loaded once per phase."""
        name = vector_name(row)
        if name not in names:
            names[name] = name
            lines.append(f"{name} = support.vector(page, slot, {row.row}, {row.length})")
        return name

    def _state(self, phase: VectorPhase, node: Node) -> tuple[str, str] | None:
        if not node.states:
            return None
        name = phase.states[node.states[0]]
        return f"m.{name}", f"c.{name}"

    def _constant(
        self, phase: VectorPhase, node: Node, names: dict[str, str], lines: list[str]
    ) -> str | None:
        if not isinstance(node.op, ops.RotaryTable):
            return None
        wanted = rotary_frequencies(node.op)
        rows = self.program.pages[phase.page]
        return self._vector(next(row for row in rows if row.constant == wanted), names, lines)

    def _taps(
        self, phase: VectorPhase, node: Node, names: dict[str, str], lines: list[str]
    ) -> tuple[str, ...]:
        if not isinstance(node.op, ops.CausalConv):
            return ()
        return tuple(
            self._vector(self._row(phase.page, param=node.operands[1], tap=tap), names, lines)
            for tap in range(node.op.taps)
        )

    def delta_rule(self, phase: DeltaRulePhase) -> list[str]:
        return [
            "cursor = support.delta_rule(",
            f"    m.{phase.stream},",
            f"    c.{phase.stream},",
            "    m.positions,",
            f"    q={self.view(phase.q)},",
            f"    k={self.view(phase.k)},",
            f"    v={self.view(phase.v)},",
            f"    beta={self.view(phase.beta)},",
            f"    decay={self.view(phase.decay)},",
            f"    out={self.view(phase.output)},",
            "    batch=BATCH,",
            f"    key_heads={phase.key_heads},",
            f"    value_heads={phase.value_heads},",
            f"    key_dim={phase.key_dim},",
            f"    value_dim={phase.value_dim},",
            ")",
            f"return c._replace({phase.stream}=cursor)",
        ]

    def attention(self, phase: AttentionPhase) -> list[str]:
        return [
            "cursor = support.attention(",
            f"    m.{phase.cache},",
            f"    c.{phase.cache},",
            "    m.positions,",
            f"    q={self.view(phase.q)},",
            f"    k={self.view(phase.k)},",
            f"    v={self.view(phase.v)},",
            f"    out={self.view(phase.output)},",
            f"    heads={phase.heads},",
            f"    kv_heads={phase.kv_heads},",
            f"    head_dim={phase.head_dim},",
            f"    scale={phase.scale!r},",
            ")",
            f"return c._replace({phase.cache}=cursor)",
        ]

    def all_reduce(self, phase: AllReducePhase) -> list[str]:
        name = phase.exchange
        plan = next(one for one in self.program.exchanges if one.name == name)
        lanes = f"{phase.partial.start}:{phase.partial.start + phase.partial.width}"
        if phase.algorithm == "one_shot":
            lines = [
                "total = support.all_reduce_one_shot(",
                f"    m.{phase.partial.buffer}[0:{plan.rows}, {lanes}],",
                f"    send=m.{name}_send,",
                f"    receive=m.{name}_receive,",
                f"    send_sem=m.{name}_sems.at[0],",
                f"    receive_sem=m.{name}_sems.at[1],",
                "    ranks=RANKS,",
                ")",
            ]
            total = "support.round_bf16(total)" if phase.rounds else "total"
            value = f"jnp.broadcast_to({total}, (ROWS, {phase.output.width}))"
        else:
            lines = [
                "total = support.all_reduce_two_phase(",
                f"    m.{phase.partial.buffer}.at[:, {lanes}],",
                f"    scattered=m.{name}_scattered,",
                f"    send=m.{name}_send,",
                f"    gathered=m.{name}_gathered,",
                f"    scatter_send_sem=m.{name}_sems.at[0],",
                f"    scatter_receive_sem=m.{name}_sems.at[1],",
                f"    gather_send_sem=m.{name}_sems.at[2],",
                f"    gather_receive_sem=m.{name}_sems.at[3],",
                "    ranks=RANKS,",
                ")",
            ]
            value = "total"
        lines.append(self.store(phase.output, value))
        return [*lines, *_meeting(phase.meets), "return c"]

    def argmax(self, phase: ArgmaxPhase) -> list[str]:
        lines = []
        if phase.masks:
            lines.append(
                f"support.mask_tokens({self.view(phase.logits)}, {masks_memory(phase.masks)})"
            )
        lines += [
            f"best, index = support.local_argmax({self.view(phase.logits)}, {phase.columns})",
        ]
        if phase.exchange:
            name = phase.exchange
            lines += [
                "index = support.sharded_argmax(",
                "    best,",
                "    index,",
                f"    send=m.{name}_send,",
                f"    receive=m.{name}_receive,",
                f"    send_sem=m.{name}_sems.at[0],",
                f"    receive_sem=m.{name}_sems.at[1],",
                "    ranks=RANKS,",
                f"    columns_per_rank={phase.columns},",
                ")",
            ]
        lines.append("support.store_tokens(index, m.next_token, BATCH)")
        return [*lines, *_meeting(phase.meets), "return c"]


def masks_memory(operand: str) -> str:
    """Token masks in HBM and VMEM, and the semaphore of their copy."""
    return f"m.{operand}, m.{operand}_block, m.{operand}_sem.at[0]"


def _meeting(meets: bool) -> list[str]:
    if not meets:
        return []
    return [
        "# The next exchange uses the same buffers: every rank has read them.",
        "support.entry_barrier(RANKS)",
    ]


def refill_source(guards: tuple[Guard, ...]) -> str:
    """A refill as source: rows, None, or a `support.Choice` by the loops' ends."""
    if len(guards) == 1:
        return str(guards[0].rows)
    cases = []
    for guard in guards[:-1]:
        cases.append(f"(~last[{guard.loop!r}], {guard.rows})")
    return f"support.Choice(({', '.join(cases)},), {guards[-1].rows})"


def needs_last(phase: Phase | StreamWaitPhase | StreamAdvancePhase) -> bool:
    """True when a refill of the phase depends on a loop's end."""
    return isinstance(phase, MatmulPhase) and any(
        len(guards) > 1 for run in phase.runs for guards in run.refill
    )


def _tile_name(blocks: int, sizes: list[int]) -> str:
    return "tile" if len(sizes) == 1 else f"tile_{blocks}"


def _sum(start: int, expression: str) -> str:
    return expression if start == 0 else f"{start} + {expression}"


def _value_types(graph: Graph) -> dict[str, TensorType]:
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
    tap = "" if row.tap is None else f"_{row.tap}"
    return f"w_{param_word(row.param)}{tap}"


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
