"""Executes a program on VMEM regions that hold symbols: see `tests.passes.meaning`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

import numpy as np

from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.types import DType
from mkc.passes.pipeline import Lowered
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import Buffer
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AllGatherPhase
from tests.passes.meaning import NOTHING
from tests.passes.meaning import Lanes
from tests.passes.meaning import Meaning
from tests.passes.meaning import Symbols
from tests.passes.meaning import described
from tests.passes.meaning import instance_name
from tests.passes.meaning import is_view
from tests.passes.meaning import views
from tests.passes.meaning import width_of


class MachineError(AssertionError):
    """A program does what no program may do."""


def unrolled(body: tuple[Phase | Loop, ...]) -> Iterator[Phase]:
    """Every execution of every phase, in order."""
    for item in body:
        if isinstance(item, Loop):
            for _ in range(item.count):
                yield from unrolled(item.body)
        else:
            yield item


def run_program(lowered: Lowered, symbols: Symbols) -> Meaning:
    """Executes the program. Raises `MachineError` for a read or write outside its buffer."""
    return execute(Machine(lowered=lowered, symbols=symbols))


def execute(machine: Machine) -> Meaning:
    """All phases, then the outputs in buffers."""
    lowered = machine.lowered
    for phase in unrolled(lowered.program.body):
        machine.phase(phase)
    if lowered.program.logits is not None:
        machine.meaning.outputs["logits"] = machine.read(lowered.program.logits)
    machine.check_streams_used_up()
    if machine.begun:
        raise MachineError(f"{list(machine.begun)} have not ended")
    return machine.meaning


@dataclass(kw_only=True)
class Machine:
    """VMEM regions, and how far every stream has come."""

    lowered: Lowered
    symbols: Symbols
    regions: dict[str, Lanes] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)  # stream or cache -> items used up
    waited: set[str] = field(default_factory=set)
    executed: dict[str, int] = field(default_factory=dict)  # matmul phase id -> executions
    scalars: dict[str, Lanes | str] = field(default_factory=dict)  # of a round, by array
    begun: dict[str, list[Lanes]] = field(default_factory=dict)  # exchange -> operands on their way
    meaning: Meaning = field(default_factory=Meaning)
    at: str = ""

    def __post_init__(self) -> None:
        for buffer in self.lowered.program.buffers:
            self.buffers[buffer.name] = buffer
            self.regions[buffer.region] = np.full(buffer.region_lanes, NOTHING, np.int64)

    @property
    def graph(self) -> Graph:
        return self.lowered.steps.sharded.graph

    def read(self, view: View) -> Lanes:
        self.inside(view)
        lanes = self.regions[self.buffers[view.buffer].region]
        return lanes[view.start : view.start + view.width].copy()

    def write(self, view: View, lanes: Lanes) -> None:
        self.inside(view)
        region = self.regions[self.buffers[view.buffer].region]
        region[view.start : view.start + view.width] = lanes

    def inside(self, view: View) -> None:
        buffer = self.buffers[view.buffer]
        if not 0 <= view.start <= view.start + view.width <= buffer.shape[1]:
            raise MachineError(f"{self.at}: {view} is outside of {buffer.name} {buffer.shape}")
        if buffer.shape[1] > buffer.region_lanes:
            raise MachineError(f"{buffer.name} is wider than its region")

    def apply(self, op: str, *operands: Lanes | str, width: int) -> Lanes:
        operation = self.symbols.apply(op, operands)
        self.meaning.operations.append((operation, self.at))
        return self.symbols.result(operation, width)

    def apart(self, phase: Phase, output: View, *inputs: View) -> None:
        """A phase that writes its output bit by bit must not write where it still reads."""
        region = self.buffers[output.buffer].region
        if any(self.buffers[one.buffer].region == region for one in inputs):
            raise MachineError(f"{phase.id} writes {output.buffer} over its own input")

    def phase(self, phase: Phase) -> None:
        self.at = f"{phase.id} ({phase.title})"
        match phase:
            case EmbedPhase():
                table = instance_name(self.graph, phase.param, 0)
                width = phase.output.width
                source = self.looked_up(phase)
                self.write(phase.output, self.apply("embed", source, table, width=width))
            case MatmulPhase() | NarrowMatmulPhase():
                self.matmul(phase)
            case VectorPhase():
                self.vector(phase)
            case DeltaRulePhase():
                self.delta_rule(phase)
            case AttentionPhase():
                self.attention(phase)
            case AllReducePhase():
                self.exchange(phase, "all_reduce", (phase.partial,), (phase.output,))
            case AllGatherPhase():
                self.exchange(phase, "all_gather", phase.parts, phase.outputs)
            case ArgmaxPhase():
                logits = self.read(phase.logits)
                if phase.masks:
                    logits = self.apply("mask_tokens", logits, phase.masks, width=len(logits))
                    self.write(phase.logits, logits)
                tokens = self.apply("argmax", logits, width=self.lowered.program.rows)
                self.meaning.outputs["next_token"] = tokens
            case StreamWaitPhase():
                self.waited.add(phase.stream)
            case StreamAdvancePhase():
                self.advance(phase.stream)
            case _:
                self.round_phase(phase)

    def round_phase(self, phase: Phase) -> None:
        """A phase that only rounds have."""
        raise MachineError(f"unknown phase {phase}")

    def exchange(
        self,
        phase: AllReducePhase | AllGatherPhase,
        op: str,
        sources: tuple[View, ...],
        outputs: tuple[View, ...],
    ) -> None:
        """A start takes its operands with it; nothing is visible of the results before the end."""
        if self.begun and phase.part is not Part.FINISH:
            raise MachineError(f"{self.at} begins before another exchange has ended")
        if phase.part is Part.START:
            self.begun[phase.exchange] = self.sent(sources)
            return
        parts = self.sent(sources)
        if phase.part is Part.FINISH:
            if phase.exchange not in self.begun:
                raise MachineError(f"{self.at} ends what was not started")
            parts, now = self.begun.pop(phase.exchange), parts
            if self.sends_in_place(phase) and not all(map(np.array_equal, parts, now)):
                raise MachineError(f"{self.at}: partial sums were overwritten on their way")
        for part, output in zip(parts, outputs, strict=True):
            self.write(output, self.apply(op, part, width=output.width))

    def sent(self, sources: tuple[View, ...]) -> list[Lanes]:
        return [self.read(one) for one in sources]

    def sends_in_place(self, phase: AllReducePhase | AllGatherPhase) -> bool:
        """Messages leave from the operand itself; others are copied into a buffer first."""
        plan = next(one for one in self.lowered.program.exchanges if one.name == phase.exchange)
        return plan.kind == "two_phase" and plan.wire is DType.F32

    def looked_up(self, phase: EmbedPhase) -> Lanes | str:
        return self.scalars.get(phase.source, phase.source)

    def matmul(self, phase: MatmulPhase | NarrowMatmulPhase) -> None:
        """A wide matmul writes whole blocks of columns, a narrow one only what it computes."""
        products = [(phase.left, phase.output)]
        instance = self.executed.get(phase.id, 0)
        if isinstance(phase, NarrowMatmulPhase):
            instance = self.item(phase.stream)
        else:
            self.executed[phase.id] = instance + 1
            products += [(one.left, one.output) for one in phase.also]
        lefts = [self.read(left) for left, _ in products]  # all are read while all are written
        for left, (_, output) in zip(lefts, products, strict=True):
            if len(left) != phase.K:
                raise MachineError(f"{self.at} contracts {phase.K} but reads {len(left)} lanes")
            self.apart(phase, output, *(one for one, _ in products))
            if isinstance(phase, MatmulPhase):
                width = phase.blocks * TAPE_LANES
                whole = View(buffer=output.buffer, start=output.start, width=width)
                self.write(whole, np.full(whole.width, NOTHING, np.int64))
            for piece in phase.pieces:
                weight = instance_name(self.graph, piece.param, instance)
                result = self.apply("linear", left, weight, width=piece.width)
                start = output.start + piece.column
                self.write(View(buffer=output.buffer, start=start, width=piece.width), result)

    def vector(self, phase: VectorPhase) -> None:
        """Operands come from the chain itself or from a buffer; results are stored at the end."""
        local: dict[str, Lanes] = {}
        for node in phase.nodes:
            operands = tuple(self.operand(phase, node, name, local) for name in node.operands)
            states = tuple(self.state(key, phase.states[key]) for key in node.states)
            if is_view(node):
                (lanes,) = operands
                assert not isinstance(lanes, str)
                results = views(node, lanes)
            else:
                operation = self.symbols.apply(described(node.op), (*operands, *states))
                self.meaning.operations.append((operation, self.at))
                results = [
                    self.symbols.result(operation, width_of(value.type), index)
                    for index, value in enumerate(node.results)
                ]
            for value, lanes in zip(node.results, results, strict=True):
                local[value.name] = lanes
        for name, view in phase.writes.items():
            self.write(view, local[name])
        for stream in phase.states.values():
            self.items[stream] = self.item(stream, arrived=False) + 1

    def operand(
        self, phase: VectorPhase, node: Node, name: str, local: dict[str, Lanes]
    ) -> Lanes | str:
        if name in self.graph.params:
            if not any(row.param == name for row in self.lowered.program.pages[phase.page]):
                raise MachineError(f"{self.at} needs {name}, which {phase.page} does not hold")
            return instance_name(self.graph, name, self.item(phase.page))
        if name in phase.scalars:
            return self.scalars[phase.scalars[name]]
        if name in {value.name for value in self.graph.inputs}:
            return name
        if name in local:
            return local[name]
        alias = self.lowered.steps.resolve(name)
        if alias.base in local:
            return local[alias.base][alias.start : alias.start + alias.width]
        base = phase.reads[alias.base]
        view = View(buffer=base.buffer, start=base.start + alias.start, width=alias.width)
        return self.read(view)

    def delta_rule(self, phase: DeltaRulePhase) -> None:
        inputs = (phase.q, phase.k, phase.v, phase.beta, phase.decay)
        self.apart(phase, phase.output, *inputs)
        key = self.state_key(phase.stream)
        # The stream has an item per sequence, the graph an instance per layer.
        batch = self.lowered.program.batch
        item = self.item(phase.stream, arrived=False)
        state = instance_name(self.graph, key, item // batch)
        self.items[phase.stream] = item + batch
        lanes = [self.read(one) for one in inputs]
        self.write(phase.output, self.apply("delta_rule", *lanes, state, width=phase.output.width))

    def attention(self, phase: AttentionPhase) -> None:
        self.apart(phase, phase.output, phase.q, phase.k, phase.v)
        layer = self.items.get(phase.cache, 0)
        self.items[phase.cache] = layer + 1
        streams = self.lowered.residency.streams
        key = next(one for one, name in streams.cache_of.items() if name == phase.cache)
        states = [instance_name(self.graph, one, layer) for one in (key, streams.value_of[key])]
        lanes = [self.read(one) for one in (phase.q, phase.k, phase.v)]
        result = self.apply("attention", *lanes, "positions", *states, width=phase.output.width)
        self.write(phase.output, result)

    def state_key(self, stream: str) -> str:
        states = self.lowered.residency.streams.state_of
        return next(key for key, name in states.items() if name == stream)

    def state(self, key: str, stream: str) -> str:
        return instance_name(self.graph, key, self.item(stream, arrived=False))

    def item(self, stream: str, *, arrived: bool = True) -> int:
        """The current item; `arrived` for streams that a phase of their own waits for."""
        if arrived and stream not in self.waited:
            raise MachineError(f"{self.at} reads {stream} before it has arrived")
        return self.items.get(stream, 0)

    def advance(self, stream: str) -> None:
        self.item(stream)
        self.items[stream] = self.items.get(stream, 0) + 1
        self.waited.remove(stream)

    def check_streams_used_up(self) -> None:
        """Every item of every stream was used exactly once."""
        program = self.lowered.program
        planned = {one.name: one.items for one in program.streams}
        planned |= {one.name: one.layers for one in program.caches}
        if self.items != planned:
            raise MachineError(f"streams used {self.items}, planned {planned}")
        if self.waited:
            raise MachineError(f"{self.waited} waited for and not released")
