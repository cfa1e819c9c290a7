"""The source of every phase: one function of the generated kernel each.

A phase function takes the memory `m`, the cursors `c` and, where a refill depends on it, which
loops are in their last iteration; it returns the cursors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mkc.codegen_pallas import phases_experts
from mkc.codegen_pallas import phases_mixing
from mkc.codegen_pallas.phases_exchange import all_gather_lines
from mkc.codegen_pallas.phases_exchange import all_reduce_lines
from mkc.codegen_pallas.phases_rounds import round_lines
from mkc.codegen_pallas.phases_vector import value_types
from mkc.codegen_pallas.phases_vector import vector_lines
from mkc.ir.graph import Graph
from mkc.ir.types import DType
from mkc.passes.steps import StepGraph
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
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
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import TileRun
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AllGatherPhase

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
        self.types = value_types(self.graph)

    def lines(self, phase: Phase) -> list[str]:
        """The body of the phase function, without its header."""
        writers: dict[type[Phase], Callable[[Any], list[str]]] = {
            EmbedPhase: self.embed,
            MatmulPhase: self.matmul,
            NarrowMatmulPhase: self.narrow,
            VectorPhase: partial(vector_lines, self),
            DeltaRulePhase: self.delta_rule,
            AttentionPhase: self.attention,
            AllReducePhase: partial(all_reduce_lines, self),
            AllGatherPhase: partial(all_gather_lines, self),
            ArgmaxPhase: self.argmax,
            ClearBlocksPhase: partial(phases_mixing.clear_blocks, self),
            RoutePhase: partial(phases_experts.route, self),
            ExpertsPhase: partial(phases_experts.experts, self),
            LatentAttentionPhase: partial(phases_mixing.latent_attention, self),
            StoreBlockPhase: partial(phases_mixing.store_block, self),
        }
        writer = writers.get(type(phase))
        return writer(phase) if writer else round_lines(self, phase)

    @property
    def rows(self) -> str:
        """How many rows scalar arrays are for, as source."""
        return "BATCH" if self.program.round is None else "TOKEN_ROWS"

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
            f"    blocks=m.{lookup_name(phase)}_blocks,",
            f"    sem=m.{lookup_name(phase)}_sem.at[0],",
            f"    out=m.{phase.output.buffer},",
            f"    batch={self.rows},",
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
        products = _products(phase)
        lines = [f"support.tape_wait(m.tape, c.tape, {K * blocks})"]
        lines += [f"{one.name('left')} = {self._left(one.left, 0, K)}" for one in products]
        for index in range(blocks):
            rows = f"{index * K}:{(index + 1) * K}"
            lines.append(f"weights = m.tape.ring[c.tape.slot, {rows}, :]")
            lines += [
                f"{one.name(f'block_{index}')} = jnp.dot({one.name('left')}, weights, "
                f"preferred_element_type=jnp.float32)"
                for one in products
            ]
        for one in products:
            names = [one.name(f"block_{index}") for index in range(blocks)]
            joined = names[0] if blocks == 1 else f"jnp.concatenate([{', '.join(names)}], axis=1)"
            lines += self._store_tile(phase, one.output, joined, blocks)
        lines.append("return c._replace(tape=support.refill(m.tape, c.tape, refills[0]))")
        return lines

    def _chunked_tile(self, phase: MatmulPhase, blocks: int) -> list[str]:
        """Several loads bring one column block."""
        rows = phase.K // phase.loads_per_step
        products = _products(phase)
        lines = [
            f"{one.name('total')} = jnp.zeros((ROWS, {TAPE_LANES}), jnp.float32)"
            for one in products
        ]
        for load in range(phase.loads_per_step):
            lines += [
                f"support.tape_wait(m.tape, c.tape, {rows})",
                f"weights = m.tape.ring[c.tape.slot, 0:{rows}, :]",
            ]
            lines += [
                f"{one.name('total')} += jnp.dot({self._left(one.left, load * rows, rows)}, "
                f"weights, preferred_element_type=jnp.float32)"
                for one in products
            ]
            lines.append(f"c = c._replace(tape=support.refill(m.tape, c.tape, refills[{load}]))")
        for one in products:
            lines += self._store_tile(phase, one.output, one.name("total"), blocks)
        return [*lines, "return c"]

    def _left(self, left: View, start: int, width: int) -> str:
        view = View(buffer=left.buffer, start=left.start + start, width=width)
        cast = "" if self.buffers[view.buffer].dtype is DType.BF16 else ".astype(jnp.bfloat16)"
        return f"{self.slice(view)}{cast}"

    def _store_tile(self, phase: MatmulPhase, output: View, value: str, blocks: int) -> list[str]:
        columns = phase.blocks_per_step * TAPE_LANES
        rounded = value
        if phase.rounded_columns == phase.columns:
            rounded = f"support.round_bf16({value})"
        elif phase.rounded_columns:
            count = f"{phase.rounded_columns} - step * {columns}"
            rounded = f"support.round_first_lanes({value}, {count})"
        cast = ".astype(jnp.bfloat16)" if self.buffers[output.buffer].dtype is DType.BF16 else ""
        width = blocks * TAPE_LANES
        at = f"support.lanes({_sum(output.start, f'step * {columns}')}, {width})"
        return [f"m.{output.buffer}[:, {at}] = {rounded}{cast}"]

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

    def delta_rule(self, phase: DeltaRulePhase) -> list[str]:
        function = "channel_delta_rule" if phase.channels else "delta_rule"
        return [
            f"cursor = support.{function}(",
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
            *([] if phase.rounds else ["    rounds=False,"]),
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

    def best(self, logits: View, columns: int, exchange: str | None) -> list[str]:
        """`index`: the column of the largest logit of each row, over all ranks."""
        lines = [f"best, index = support.local_argmax({self.view(logits)}, {columns})"]
        if exchange:
            lines += [
                "index = support.sharded_argmax(",
                "    best,",
                "    index,",
                *self.exchange_arguments(exchange),
                f"    columns_per_rank={columns},",
                ")",
            ]
        return lines

    def exchange_arguments(self, name: str) -> list[str]:
        """Buffers and semaphores of an exchange with one message to each peer."""
        plan = next(one for one in self.program.exchanges if one.name == name)
        return [
            f"    send=m.{name}_send,",
            f"    receive=m.{name}_receive,",
            f"    send_sem=m.{name}_sems.at[0],",
            f"    receive_sem=m.{name}_sems.at[1],",
            f"    ranks={plan.group or 'RANKS'},",
        ]

    def meeting(self, meets: bool) -> list[str]:
        """All ranks wait for each other behind an exchange, where that is needed."""
        if not meets:
            return []
        return [
            "# The next exchange uses the same buffers: every rank has read them.",
            "support.entry_barrier(RANKS)",
        ]

    def masking(self, logits: View, masks: str) -> list[str]:
        """Masks of tokens are applied to the logits, if there are any."""
        if not masks:
            return []
        return [f"support.mask_tokens({self.view(logits)}, {masks_memory(masks)})"]

    def argmax(self, phase: ArgmaxPhase) -> list[str]:
        lines = self.masking(phase.logits, phase.masks)
        lines += self.best(phase.logits, phase.columns, phase.exchange)
        lines.append("support.store_tokens(index, m.next_token, BATCH)")
        return [*lines, *self.meeting(phase.meets), "return c"]


def masks_memory(operand: str) -> str:
    """Token masks in HBM and VMEM, and the semaphore of their copy."""
    return f"m.{operand}, m.{operand}_block, m.{operand}_sem.at[0]"


def lookup_name(phase: EmbedPhase) -> str:
    """Before the names of the scratch of a table's lookups."""
    return phase.table.removeprefix("table_")


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


@dataclass(frozen=True, kw_only=True)
class _Product:
    """One of the products of a matmul; names of all but the first have a number."""

    left: View
    output: View
    number: int

    def name(self, word: str) -> str:
        return f"also_{self.number}_{word}" if self.number else word


def _products(phase: MatmulPhase) -> list[_Product]:
    pairs = [(phase.left, phase.output), *((one.left, one.output) for one in phase.also)]
    return [
        _Product(left=left, output=output, number=number)
        for number, (left, output) in enumerate(pairs)
    ]


def _tile_name(blocks: int, sizes: list[int]) -> str:
    return "tile" if len(sizes) == 1 else f"tile_{blocks}"


def _sum(start: int, expression: str) -> str:
    return expression if start == 0 else f"{start} + {expression}"
