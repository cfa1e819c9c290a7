"""What the phases of speculative rounds do, as events; part of `protocol`.

Scalars decide here which rows enter which cache, so they are computed: tokens that the model
chooses stand for any and are 0, how many are accepted is said by the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from mkc.ir import ops_spec
from mkc.ir.graph import Node
from mkc.schedule.counted import COUNTED
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.program import RESTING
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import Phase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SampledAccept
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.scalars import CarriedRows
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.selector import MarkovWalk
from mkc.schedule.verify.selector import Walk

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel

ANY_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The phases of one rank that only rounds have.

    Attributes:
      scalars: name of an array -> its numbers in this round.
      executed: counter of taps or of blocks -> executions so far in this round.
    """

    kernel: Kernel
    scalars: dict[str, list[int]] = field(default_factory=dict)
    executed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart_counters()

    def restart_counters(self) -> None:
        for phase in self.kernel.program.phases():
            if isinstance(phase, (ClearBlocksPhase, *COUNTED)):
                self.executed[phase.counter] = 0

    @property
    def size(self) -> int:
        """Rows of one sequence."""
        plan = self.kernel.program.round
        assert plan is not None
        return plan.rows_per_sequence

    # around the phases

    def begin(self, kept: tuple[int, ...]) -> None:
        """What the round is given; what it computes later is not known before."""
        kernel = self.kernel
        plan = kernel.program.round
        assert plan is not None
        self.scalars.clear()
        self.scalars[plan.tokens] = [ANY_TOKEN] * kernel.program.rows
        self.scalars[plan.positions] = [
            first + row if row < rows else RESTING
            for first, rows in zip(kernel.positions, kernel.real, strict=True)
            for row in range(self.size)
        ]
        self.scalars[plan.kept] = list(kept)
        self.restart_counters()

    def fetch_rows(self) -> None:
        """What the launch before carried on as rows."""
        for one in self.carried_rows():
            self.copy("begin_sampled_rounds", one.target, one.array)

    def save_rows(self) -> None:
        for one in self.carried_rows():
            self.copy("end_sampled_rounds", one.array, one.target)

    def copy(self, routine: str, source: str, target: str) -> None:
        kernel, semaphore = self.kernel, ("rows_sem", (0,))
        kernel.start(routine, Place(array=source), Place(array=target), semaphore)
        kernel.wait(routine, semaphore, kernel.size(Place(array=target)))

    def carried_rows(self) -> tuple[CarriedRows, ...]:
        plan = self.kernel.program.round
        return () if plan is None else plan.rows

    def keep_rows(self) -> None:
        """Sequences that emitted something carry on what the round made, others what they had."""
        for one in self.carried_rows():
            here, data = Place(array=one.array), Place(array=one.target)
            self.kernel.load("end_sampled_round", one.source)
            self.kernel.read("end_sampled_round", here, data)
            self.kernel.write("end_sampled_round", here, data, saved=True)

    def end(self) -> None:
        """What is handed on: the next round begins behind the accepted rows, and commits these."""
        self.keep_rows()
        kernel = self.kernel
        plan = kernel.program.round
        assert plan is not None
        sources = {one.target: one.source for one in plan.carried}
        wanted = (plan.tokens, plan.positions, plan.kept)
        missing = [name for name in wanted if sources.get(name) not in self.scalars]
        if missing:
            kernel.sink.problem("V504", "end", f"nothing is handed on as {missing[0]}")
            return
        context = kernel.program.context
        for sequence, first in enumerate(kernel.positions):
            if first < 0:
                continue
            count = kernel.accepted[sequence]
            start = self.scalars[sources[plan.positions]][sequence * self.size]
            expected = first + count if first + count < context else RESTING
            if start != expected:
                message = (
                    f"{count} rows from {first} are accepted, and the next round is at {start}"
                )
                kernel.sink.problem("V504", "end", message)
            kept = self.scalars[sources[plan.kept]][sequence]
            if kept != count:
                message = f"{count} rows are accepted, and the next round commits {kept}"
                kernel.sink.problem("V504", "end", message)

    def lookups(self, name: str) -> list[int]:
        """The table rows that the numbers of an array ask for; negative ones stand for row 0."""
        return [max(one, 0) for one in self.scalars[name]]

    # phases

    def phase(self, phase: Phase) -> None:
        known: dict[type[Phase], Callable[[Any], None]] = {
            AcceptPhase: self.accept,
            AllGatherPhase: self.kernel.exchanges.all_gather,
            CutDraftsPhase: self.cut_drafts,
            KeptDeltaRulePhase: self.kept_delta_rule,
            MarkovWalkPhase: self.markov_walk,
            RowsAttentionPhase: self.kernel.rows_attention.phase,
            ScalarPhase: self.scalar,
            SelectorWalkPhase: self.selector_walk,
            TapPhase: self.tap,
            TopKPhase: self.top_k,
        }
        known[type(phase)](phase)

    def check_kept(self, phase: Phase, positions: str, kept: str) -> None:
        """States take part in the round's own rows, and commit what the round before accepted."""
        plan = self.kernel.program.round
        assert plan is not None
        if (positions, kept) != (plan.positions, plan.kept):
            message = (
                f"rows of {positions} with {kept} committed, not {plan.positions} and {plan.kept}"
            )
            self.kernel.sink.problem("V504", phase.id, message)

    def vector(self, phase: VectorPhase) -> None:
        """Convolutions of kept rows; all else is as in a plain step."""
        plan = self.kernel.program.round
        assert plan is not None
        for node in phase.nodes:
            if isinstance(node.op, ops_spec.KeptConv):
                self.check_kept(phase, plan.positions, phase.scalars[node.operands[2]])

    def kept_delta_rule(self, phase: KeptDeltaRulePhase) -> None:
        """Four streams move on together, sequence by sequence.

        Heads are read and stored in turn, so an output must not take the place of an input.
        """
        kernel, routine = self.kernel, "kept_delta_rule"
        self.check_kept(phase, phase.positions, phase.kept)
        names = (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay)
        cursors = [kernel.streams[name] for name in names]
        views = (phase.q, phase.k, phase.v, phase.beta, phase.decay)
        for sequence in range(kernel.program.batch):
            for cursor in cursors:
                kernel.stream_wait(cursor)
            if kernel.positions[sequence] >= 0:
                for view in views:
                    kernel.load(routine, view)
                for cursor in cursors:
                    kernel.stream_read(routine, cursor)
                    kernel.stream_change(routine, cursor)
                kernel.store_row(routine, phase.output)
                for view in views:
                    kernel.load(routine, view)
            for cursor in cursors:
                kernel.stream_advance(cursor)
        if not any(position >= 0 for position in kernel.positions):
            kernel.rest(routine, phase.output)

    def tap(self, phase: TapPhase) -> None:
        """Every execution has a place of its own, but for those that nobody reads."""
        kernel = self.kernel
        number = self.executed[phase.counter]
        self.executed[phase.counter] = number + 1
        kernel.load("tap", phase.source)
        if number >= len(phase.places):
            message = f"execution {number} of {len(phase.places)} planned ones"
            kernel.sink.problem("V506", phase.id, message)
            return
        start = phase.places[number] * phase.width
        kernel.store("tap", View(buffer=phase.buffer, start=start, width=phase.width))

    def top_k(self, phase: TopKPhase) -> None:
        self.kernel.load("local_top_k", phase.logits)
        self.kernel.exchanges.best(phase.exchange)
        for view in (phase.values, phase.ids):
            self.kernel.store("top_k", view)
        self.kernel.exchanges.meeting(phase.meets)

    def accept(self, phase: AcceptPhase) -> None:
        kernel, sampling = self.kernel, phase.sampling
        kernel.exchanges.mask_tokens(phase)
        if sampling is None:
            kernel.load("local_argmax", phase.logits)
            kernel.exchanges.best(phase.exchange)
        else:
            self.sampled_accept(phase, sampling)
        self.scalars[phase.emitted] = [ANY_TOKEN] * kernel.program.rows
        self.scalars[phase.count] = list(kernel.accepted)
        self.scalars[phase.last] = [ANY_TOKEN] * kernel.program.batch
        kernel.exchanges.meeting(phase.meets)

    def sampled_accept(self, phase: AcceptPhase, sampling: SampledAccept) -> None:
        """The largest logits of all ranks are exchanged, and then the winners of their races."""
        kernel, routine = self.kernel, "accept_sampled"
        kernel.load("local_top_k", phase.logits)
        carried = {one.array: one for one in self.carried_rows()}
        for array in filter(None, (sampling.candidates, sampling.proposal)):
            if array in carried:
                kernel.read(routine, Place(array=array), Place(array=carried[array].target))
            else:
                kernel.sink.problem("V504", phase.id, f"no round hands on {array}")
        kernel.load(routine, phase.logits)
        for exchange in (phase.exchange, sampling.race):
            if exchange is not None:
                kernel.exchanges.one_shot(exchange, routine)
            kernel.load(routine, phase.logits)

    def scalar(self, phase: ScalarPhase) -> None:
        for node in phase.nodes:
            operands = [self.scalars[phase.scalars[name]] for name in node.operands]
            self.scalars[phase.scalars[node.results[0].name]] = self.computed(node, operands)

    def computed(self, node: Node, operands: list[list[int]]) -> list[int]:
        """As the reference: `mkc.ir.reference_spec`."""
        size = self.size
        found: list[int] = []
        for sequence in range(self.kernel.program.batch):
            rows = range(sequence * size, (sequence + 1) * size)
            match node.op:
                case ops_spec.KeptPositions():
                    positions, count = operands[0], operands[1][sequence]
                    found += [
                        positions[one] if row < count else RESTING for row, one in enumerate(rows)
                    ]
                case ops_spec.NextPositions() as op:
                    first = operands[0][rows[0]]
                    start = first + operands[1][sequence]
                    found += [
                        start + row if first >= 0 and start + row < op.context else RESTING
                        for row in range(size)
                    ]
                case ops_spec.BlockTokens() as op:
                    found += [operands[0][sequence], *[op.mask] * (size - 1)]
                case _:
                    raise AssertionError(f"{node.op.mnemonic} is no arithmetic of scalars")
        return found

    def selector_walk(self, phase: SelectorWalkPhase) -> None:
        """The rows of all candidates are fetched one row of the walk ahead; the row of the choice
        before is known only when it has been made."""
        kernel = self.kernel
        walk = Walk(kernel=kernel, phase=phase)
        if phase.sampling is not None:
            whole = replace(phase.ids, width=VECTOR_LANES)  # lanes behind the candidates hold junk
            kernel.read("sampled_walk", kernel.lanes(whole))
            kernel.store("sampled_walk", phase.sampling.proposal)
        walk.fetch_ids()
        walk.candidates(1, wait=False)
        for row in range(1, self.size):
            walk.previous(wait=False)
            if row + 1 < self.size:
                walk.candidates(row + 1, wait=False)
            walk.previous(wait=True)
            walk.candidates(row, wait=True)
            for sequence in range(kernel.program.batch):
                walk.choose(sequence, row)
                if phase.sampling is not None:
                    kernel.store_row("sampled_walk", phase.sampling.proposal)
        self.scalars[phase.output] = [ANY_TOKEN] * kernel.program.rows

    def markov_walk(self, phase: MarkovWalkPhase) -> None:
        """Every row of the walk needs the choice of the row before."""
        MarkovWalk(kernel=self.kernel, phase=phase).run(self.size)
        self.scalars[phase.output] = [ANY_TOKEN] * self.kernel.program.rows

    def cut_drafts(self, phase: CutDraftsPhase) -> None:
        """Which rows rest depends on data; none does here. A cut keeps row 0 of each sequence, by
        which addresses and waits are decided."""
        self.kernel.load("cut_drafts", phase.confidence)
        self.scalars[phase.output] = list(self.scalars[phase.positions])
