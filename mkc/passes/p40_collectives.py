"""Pass 40: chooses how every all-reduce is done and which receive buffers it uses.

Two algorithms, both summing in rank order so that all ranks hold the same bits. One shot: every
rank sends its f32 partial to all peers. Two phases: every rank sends each peer its share of the
columns, sums its own share, and sends the rounded result to all peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkc.ir import ops
from mkc.ir.types import DType
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import ExchangePlan
from mkc.targets import Target

ONE_SHOT = "one_shot"
TWO_PHASE = "two_phase"
ARGMAX = "argmax"

SAFE_ALTERNATING = (
    "between two messages into this buffer every rank receives another exchange from its peer, "
    "which the peer sends only after it has read this buffer"
)
SAFE_TWO_PHASE = (
    "the scatter buffer is written again only after the gather of all peers has arrived, the "
    "gather buffer only after the next scatter has; peers send those after reading"
)
SAFE_ONCE = "used once per launch"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """How one exchange step is done."""

    algorithm: str
    exchange: str


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """By step id, and the buffers they share."""

    steps: dict[str, Collective]
    exchanges: tuple[ExchangePlan, ...]


@dataclass(frozen=True, kw_only=True)
class ChooseCollectives:
    """Chooses the algorithm of every exchange.

    Attributes:
      algorithm: `auto`, `one_shot` or `two_phase`.
    """

    name: ClassVar[str] = "collectives"
    algorithm: str = "auto"

    def apply(
        self, graph: StepGraph, padded_rows: int, target: Target, log: DecisionLog
    ) -> Collectives:
        """Returns the algorithm and buffers of every exchange."""
        chosen: dict[str, Collective] = {}
        plans: dict[str, ExchangePlan] = {}
        for site, step in enumerate(_exchange_sites(graph)):
            if step.kind is StepKind.ARGMAX:
                if isinstance(step.nodes[0].op, ops.ShardedArgmax):
                    chosen[step.id] = Collective(algorithm=ARGMAX, exchange="exchange_argmax")
                    plans["exchange_argmax"] = ExchangePlan(
                        name="exchange_argmax",
                        kind=ARGMAX,
                        rows=2 * padded_rows,
                        columns=VECTOR_LANES,
                        safe_because=SAFE_ONCE,
                    )
                continue
            algorithm = self._algorithm(graph, step, padded_rows, target, log)
            columns = graph.widths[step.nodes[0].results[0].name]
            rows = 1 if algorithm == ONE_SHOT and graph.sharded.graph.rows == 1 else padded_rows
            name = self._buffers(graph, step, site, algorithm, columns)
            chosen[step.id] = Collective(algorithm=algorithm, exchange=name)
            plans[name] = ExchangePlan(
                name=name,
                kind=algorithm,
                rows=rows,
                columns=columns,
                safe_because=SAFE_TWO_PHASE if algorithm == TWO_PHASE else SAFE_ALTERNATING,
            )
        return Collectives(steps=chosen, exchanges=tuple(plans[name] for name in sorted(plans)))

    def _algorithm(
        self, graph: StepGraph, step: Step, padded_rows: int, target: Target, log: DecisionLog
    ) -> str:
        ranks = graph.sharded.ranks
        columns = graph.widths[step.nodes[0].results[0].name]
        rows = 1 if graph.sharded.graph.rows == 1 else padded_rows
        share = columns // ranks
        divides = columns % (ranks * VECTOR_LANES) == 0
        one_us = target.exchange_us((ranks - 1) * rows * columns * 4)
        two_us = target.exchange_us((ranks - 1) * padded_rows * share * 4) + target.exchange_us(
            (ranks - 1) * padded_rows * share * 2
        )
        rounds = step.nodes[0].results[0].type.dtype is DType.BF16
        possible = divides and rounds
        costs = {ONE_SHOT: one_us, TWO_PHASE: two_us}
        if self.algorithm != "auto":
            best = self.algorithm if possible else ONE_SHOT
        else:
            best = min(costs, key=lambda name: costs[name]) if possible else ONE_SHOT
        # One exchange per loop body and one shot would reuse a buffer with nothing in between.
        if best == ONE_SHOT and _alone_in_loop(graph, step) and possible:
            best = TWO_PHASE
        other = TWO_PHASE if best == ONE_SHOT else ONE_SHOT
        log.choose(
            f"collectives.{step.id}",
            passed=self.name,
            chosen=f"{best}, predicted {costs[best]:.2f} us",
            because=f"[{rows}, {columns}] over {ranks} ranks",
            rejected={
                other: f"predicted {costs[other]:.2f} us"
                if possible
                else "columns do not divide into lane tiles"
            },
        )
        return best

    def _buffers(
        self, graph: StepGraph, step: Step, site: int, algorithm: str, columns: int
    ) -> str:
        """Receive buffers: shared by all two-phase exchanges, alternating for one-shot ones.

        The last of an odd number of one-shot exchanges in a loop body gets a third buffer: the next
        exchange is the first of the body again.
        """
        if algorithm == TWO_PHASE:
            return f"exchange_two_phase_{columns}"
        group = _loop_group(graph.body, step)
        place = [one.id for one in group].index(step.id)
        last_of_odd = place == len(group) - 1 and len(group) % 2 == 1 and len(group) > 1
        return f"exchange_one_shot_{columns}_{2 if last_of_odd else place % 2}"


def _exchange_sites(graph: StepGraph) -> list[Step]:
    return [step for step in graph.steps() if step.kind in (StepKind.ALL_REDUCE, StepKind.ARGMAX)]


def _loop_group(body: tuple[Step | StepLoop, ...], step: Step) -> list[Step]:
    """All-reduce steps of the innermost loop body (or the top level) that holds `step`."""
    for item in body:
        if isinstance(item, StepLoop):
            found = _loop_group(item.body, step)
            if found:
                return found
    own = [item for item in body if isinstance(item, Step) and item.kind is StepKind.ALL_REDUCE]
    return own if any(one.id == step.id for one in own) else []


def _alone_in_loop(graph: StepGraph, step: Step) -> bool:
    group = _loop_group(graph.body, step)
    top = [item for item in graph.body if isinstance(item, Step)]
    return len(group) == 1 and group[0] not in top
