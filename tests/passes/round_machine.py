"""Executes the program of a speculative round on symbols; see `tests.passes.machine`."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Phase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from tests.passes.machine import Machine
from tests.passes.machine import MachineError
from tests.passes.machine import execute
from tests.passes.meaning import Lanes
from tests.passes.meaning import Meaning
from tests.passes.meaning import Symbols
from tests.passes.meaning import described
from tests.passes.meaning import instance_name


def run_round(lowered: Lowered, symbols: Symbols) -> Meaning:
    """Executes the program. Raises `MachineError` for what no program may do."""
    plan = lowered.program.round
    assert plan is not None, "a program of a plain step"
    machine = _RoundMachine(lowered=lowered, symbols=symbols)
    values = {one.name: one.value for one in lowered.program.scalars}
    for one in plan.carried:
        machine.scalars[one.target] = values[one.target]
    meaning = execute(machine)
    outputs = {"emitted": plan.emitted, "count": plan.count}
    outputs |= {values[one.target]: one.source for one in plan.carried}
    for name, array in outputs.items():
        lanes = machine.scalars[array]
        assert not isinstance(lanes, str), f"{array} was never written"
        meaning.outputs[name] = lanes
    return meaning


@dataclass(kw_only=True)
class _RoundMachine(Machine):
    """Also knows scalar arrays, and how many layers have shown something.

    Attributes:
      taps: executions by counter.
    """

    taps: dict[str, int] = field(default_factory=dict)

    def round_phase(self, phase: Phase) -> None:
        match phase:
            case KeptDeltaRulePhase():
                self.kept_delta_rule(phase)
            case RowsAttentionPhase():
                self.rows_attention(phase)
            case TapPhase():
                count = self.taps.get(phase.counter, 0)
                self.taps[phase.counter] = count + 1
                start = phase.places[count] * phase.width
                place = View(buffer=phase.buffer, start=start, width=phase.width)
                self.write(place, self.read(phase.source))
            case TopKPhase():
                operation = self.operation("top_k", self.read(phase.logits))
                for index, view in enumerate((phase.values, phase.ids)):
                    self.write(view, self.symbols.result(operation, view.width, index))
            case AcceptPhase():
                self.accept(phase)
            case SelectorWalkPhase():
                self.selector_walk(phase)
            case ScalarPhase():
                self.scalar(phase)
            case _:
                raise MachineError(f"unknown phase {phase}")

    def operation(self, op: str, *operands: Lanes | str) -> tuple[str, tuple[bytes | str, ...]]:
        found = self.symbols.apply(op, operands)
        self.meaning.operations.append((found, self.at))
        return found

    def array(self, name: str) -> Lanes | str:
        """Scalars that were written, or the name of an input."""
        if name not in self.scalars:
            raise MachineError(f"{self.at} reads {name}, which was not written")
        return self.scalars[name]

    def store(self, name: str, operation: tuple[str, tuple[bytes | str, ...]], index: int) -> None:
        size = next(one.size for one in self.lowered.program.scalars if one.name == name)
        self.scalars[name] = self.symbols.result(operation, size, index)

    def kept_delta_rule(self, phase: KeptDeltaRulePhase) -> None:
        inputs = (phase.q, phase.k, phase.v, phase.beta, phase.decay)
        self.apart(phase, phase.output, *inputs)
        batch = self.lowered.program.batch
        states = []
        for stream in (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay):
            item = self.item(stream, arrived=False)
            states.append(instance_name(self.graph, self.state_key(stream), item // batch))
            self.items[stream] = item + batch
        operands = [*(self.read(one) for one in inputs), self.array(phase.kept), *states]
        result = self.apply("kept_delta_rule", *operands, width=phase.output.width)
        self.write(phase.output, result)

    def rows_attention(self, phase: RowsAttentionPhase) -> None:
        layer = self.items.get(phase.cache, 0)
        self.items[phase.cache] = layer + 1
        streams = self.lowered.residency.streams
        key = next(one for one, name in streams.cache_of.items() if name == phase.cache)
        states = [instance_name(self.graph, one, layer) for one in (key, streams.value_of[key])]
        views, op = [phase.q, phase.k, phase.v], "attention"
        operands = [*(self.read(one) for one in views), self.array(phase.positions)]
        if phase.remembered is not None:
            more = [phase.remembered.k, phase.remembered.v]
            operands += [*(self.read(one) for one in more), self.array(phase.remembered.positions)]
            views, op = [*views, *more], "block_attention"
        self.apart(phase, phase.output, *views)
        self.write(phase.output, self.apply(op, *operands, *states, width=phase.output.width))

    def accept(self, phase: AcceptPhase) -> None:
        given = [self.array(phase.tokens), self.array(phase.positions)]
        operation = self.operation("accept", self.read(phase.logits), *given)
        for index, name in enumerate((phase.emitted, phase.count, phase.last)):
            self.store(name, operation, index)

    def selector_walk(self, phase: SelectorWalkPhase) -> None:
        lanes = [self.read(one) for one in (phase.values, phase.ids, phase.hidden)]
        tables = [instance_name(self.graph, key, 0) for key in phase.params]
        operation = self.operation("selector_walk", *lanes, *tables, self.array(phase.tokens))
        self.store(phase.output, operation, 0)

    def scalar(self, phase: ScalarPhase) -> None:
        for node in phase.nodes:
            operands = [self.array(phase.scalars[name]) for name in node.operands]
            operation = self.operation(described(node.op), *operands)
            self.store(phase.scalars[node.results[0].name], operation, 0)
