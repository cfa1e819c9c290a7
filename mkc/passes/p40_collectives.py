"""Pass 40: chooses how every all-reduce is done and which receive buffers it uses.

All algorithms sum in the order of ranks, so that all ranks hold the same bits. One shot: every rank
sends its f32 partial to all peers. Two phases: every rank sends each peer its share of the columns,
sums its own share, and sends the rounded result to all peers. Two levels: the same among the
devices of a host, with a sum over the hosts in between. Two steps: one shot among the devices of a
host, then between hosts.

Partial sums travel in f32, which is what the graph says: a sum is rounded once. Messages of bf16
are shorter, and round every partial sum; they have to be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from itertools import count
from itertools import product
from typing import ClassVar

from mkc.ir import ops
from mkc.ir.types import DType
from mkc.passes.rank_ops import AllGather
from mkc.passes.rank_ops import ScatteredSum
from mkc.passes.rank_ops import ShardedAccept
from mkc.passes.rank_ops import ShardedMarkovWalk
from mkc.passes.rank_ops import ShardedTopK
from mkc.passes.sampled import padded_batch
from mkc.passes.sampled import samples_of
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import Part
from mkc.schedule.exchange_plan import scattered_columns
from mkc.schedule.messages import exchange_us
from mkc.schedule.program import VECTOR_LANES
from mkc.targets import Target

ONE_SHOT = "one_shot"
TWO_PHASE = "two_phase"
TWO_LEVEL = "two_level"
TWO_STEP = "two_step"
ARGMAX = "argmax"
TOP_K = "top_k"
GATHER = "gather"
GATHER_F32 = "gather_f32"
TURNS = ("exchange_walk_0", "exchange_walk_1")  # a row's message may meet one of the row before
RACE = "exchange_race"  # the winners of all ranks, behind the logits that acceptance looks at
ONE_ROW = (ONE_SHOT, TWO_LEVEL, GATHER_F32)  # of messages in f32 a single row may travel alone
NEIGHBOURS = (StepKind.ALL_REDUCE, StepKind.ALL_GATHER)
# Ops that look for the largest elements among the columns of all ranks.
DIVIDED = (ops.ShardedArgmax, ShardedAccept, ShardedTopK)

LARGEST_PADDING = 1.25  # of the columns that two phases divide into shares of whole registers

SAFE_ALTERNATING = (
    "between two messages into this buffer every rank receives another exchange from its peer, "
    "which the peer sends only after it has read this buffer"
)
SAFE_TWO_PHASE = (
    "the scatter buffer is written again only after the gather of all peers has arrived, the "
    "gather buffer only after the next scatter has; peers send those after reading"
)
SAFE_MEETING = "all ranks meet behind every exchange with this buffer, after they have read it"
SAFE_ONCE = "used once per launch, and every launch begins with a meeting of all ranks"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """How one exchange step is done; with `meets` all ranks wait for each other behind it.

    Attributes:
      race: the second exchange of acceptance by sampling.
      turns: the exchanges that the rows of a walk use in turn, `exchange` the first of them.
    """

    algorithm: str
    exchange: str
    meets: bool = False
    race: str | None = None
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """By step id, and the buffers they share."""

    steps: dict[str, Collective]
    exchanges: tuple[ExchangePlan, ...]


@dataclass(frozen=True, kw_only=True)
class ChooseCollectives:
    """Chooses the algorithm of every exchange.

    Attributes:
      algorithm: `auto`, `one_shot`, `two_phase`, `two_level` or `two_step`.
      group: ranks of the inner level, 0 for those of a host.
      wire: what partial sums travel as, `f32` or `bf16`. Those of one shot are f32, and of two
        levels where there is a single row.
    """

    name: ClassVar[str] = "collectives"
    algorithm: str = "auto"
    group: int = 0
    wire: str = "f32"

    def apply(
        self, graph: StepGraph, padded_rows: int, rounds: int, target: Target, log: DecisionLog
    ) -> Collectives:
        """Returns the algorithm and buffers of every exchange.

        With several rounds per launch the last exchange is followed by the first one again.
        """
        chosen: dict[str, Collective] = {}
        plans: dict[str, ExchangePlan] = {}
        _choose_searches(graph, padded_rows, rounds, chosen, plans)
        _choose_walks(graph, chosen, plans)
        neighbours = _Neighbours(ranks=graph.sharded.ranks)
        first, last, _ = neighbours.visit(graph.body)
        if rounds > 1 and not any(map(_is_search, _exchange_sites(graph))):
            neighbours.join(last, first)
        starts = {one.nodes: one.id for one in graph.steps() if one.part is Part.START}
        places: dict[str, int] = {}
        for step in _exchange_sites(graph):
            if step.kind not in NEIGHBOURS:
                continue
            near = neighbours.of.get(step.id, set())
            meets = step.id in near
            plan = self._plan_of(graph, step, meets, padded_rows, target, log)
            if plan.kind == TWO_PHASE:
                meets, name = False, f"exchange_two_phase_{plan.columns}"
                safe_because = SAFE_TWO_PHASE
            elif meets:
                name, safe_because = (
                    f"exchange_{plan.kind}_{plan.columns}_met_{step.id}",
                    SAFE_MEETING,
                )
            else:
                taken = {places[one] for one in near if one in places}
                places[step.id] = next(place for place in count() if place not in taken)
                sums = plan.kind in (TWO_LEVEL, TWO_STEP)
                within = f"_of_{plan.group}" if plan.group and not sums else ""
                name = f"exchange_{plan.kind}_{plan.columns}{within}_{places[step.id]}"
                safe_because = SAFE_ALTERNATING
            chosen[step.id] = Collective(algorithm=plan.kind, exchange=name, meets=meets)
            if step.part is Part.FINISH:
                chosen[starts[step.nodes]] = replace(chosen[step.id], meets=False)
            plans[name] = replace(plan, name=name, safe_because=safe_because)
        return Collectives(steps=chosen, exchanges=tuple(plans[name] for name in sorted(plans)))

    def _plan_of(
        self,
        graph: StepGraph,
        step: Step,
        repeats: bool,
        padded_rows: int,
        target: Target,
        log: DecisionLog,
    ) -> ExchangePlan:
        """What a sum or a gather exchanges; `repeats` when the next exchange is this one again."""
        if step.kind is StepKind.ALL_REDUCE:
            plans = self._plans(graph, step, padded_rows, self._group(graph, target))
            op = step.nodes[0].op
            if isinstance(op, ScatteredSum):
                plans = {name: _scattering(plan, op) for name, plan in plans.items()}
            algorithm = self._algorithm(graph, step, plans, repeats, target, log)
            found = plans[algorithm]
            assert isinstance(found, ExchangePlan)
            return found
        (node,) = step.nodes
        one_row = graph.sharded.graph.rows == 1  # a single row travels as f32 only
        exact = one_row or any(one.type.dtype is DType.F32 for one in node.results)
        columns = sum(graph.resolve(name).width for name in node.operands)
        plan = _plan(GATHER_F32 if exact else GATHER, 1 if one_row else padded_rows, columns)
        return replace(plan, group=_gathering(graph, step))

    def _group(self, graph: StepGraph, target: Target) -> int:
        """Ranks of the inner level; 0 when there is one level."""
        group, ranks = self.group or target.links.devices_per_host, graph.sharded.ranks
        return group if 1 < group < ranks and ranks % group == 0 else 0

    def _plans(self, graph: StepGraph, step: Step, padded_rows: int, group: int) -> _Plans:
        """What each algorithm would exchange, or why it is not possible."""
        ranks = graph.sharded.ranks
        columns = graph.resolve(step.nodes[0].operands[0]).width
        rows = 1 if graph.sharded.graph.rows == 1 else padded_rows
        rounds = rounds_to_bf16(step)
        wire = DType(self.wire)
        found: _Plans = {ONE_SHOT: _plan(ONE_SHOT, rows, columns)}
        whole = scattered_columns(columns, ranks)
        if not rounds:
            found[TWO_PHASE] = "the sum is not rounded to bf16"
        elif whole > LARGEST_PADDING * columns:
            found[TWO_PHASE] = "columns do not divide into lane tiles of bf16"
        else:
            found[TWO_PHASE] = replace(_plan(TWO_PHASE, padded_rows, whole), wire=wire)
        if group:
            op = step.nodes[0].op
            own = op.columns if isinstance(op, ScatteredSum) else 0
            level = _plan(TWO_LEVEL, rows, scattered_columns(columns - own, group) + own)
            level = replace(level, group=group, rounds=rounds and rows > 1, scattered=own)
            found[TWO_LEVEL] = replace(level, wire=wire) if rows > 1 else level
            if rows == 1:
                found[TWO_STEP] = replace(_plan(TWO_STEP, rows, columns), group=group, wire=wire)
            else:
                found[TWO_STEP] = "several rows are too long to travel whole"
        return found

    def _algorithm(
        self,
        graph: StepGraph,
        step: Step,
        plans: _Plans,
        repeats: bool,
        target: Target,
        log: DecisionLog,
    ) -> str:
        """The cheapest algorithm; `repeats` when the next exchange is this one again."""
        ranks = graph.sharded.ranks
        costs = {
            name: exchange_us(plan, ranks, target)
            for name, plan in plans.items()
            if isinstance(plan, ExchangePlan)
        }
        best, reason = self._wanted(costs, repeats)
        one_shot = plans[ONE_SHOT]
        assert isinstance(one_shot, ExchangePlan)
        log.choose(
            f"collectives.{step.id}",
            passed=self.name,
            chosen=f"{best}, predicted {costs[best]:.2f} us",
            because=f"[{one_shot.rows}, {one_shot.columns}] over {ranks} ranks{reason}",
            rejected={
                name: f"predicted {costs[name]:.2f} us" if name in costs else str(plan)
                for name, plan in plans.items()
                if name != best
            },
        )
        return best

    def _wanted(self, costs: dict[str, float], repeats: bool) -> tuple[str, str]:
        """The algorithm to use of those that are possible, and why when not for its cost."""
        asked = self.algorithm in costs
        best = self.algorithm if asked else min(costs, key=lambda name: costs[name])
        if best != TWO_PHASE and repeats and TWO_PHASE in costs:
            reason = "would reuse its receive buffer: the next exchange is this one again"
            return TWO_PHASE, f"; {best} {reason}"
        return best, f"; {best} was asked for" if asked else ""


type _Plans = dict[str, ExchangePlan | str]


def _plan(kind: str, rows: int, columns: int) -> ExchangePlan:
    """Not yet named; messages are whole registers."""
    whole = -(-columns // VECTOR_LANES) * VECTOR_LANES
    return ExchangePlan(name="", kind=kind, rows=rows, columns=whole, safe_because="")


def _scattering(plan: ExchangePlan | str, op: ScatteredSum) -> ExchangePlan | str:
    """The plan for a sum of which each rank of a group gets its own columns, or why there is none.

    Of two levels the other columns are padded to equal shares, not all of them.
    """
    if isinstance(plan, str):
        return plan
    if plan.kind == TWO_PHASE:
        return "every rank gets a share of the sum only"
    if plan.kind == ONE_SHOT:
        return replace(plan, scattered=op.columns)
    if plan.group != op.group:
        return f"shares of groups of {op.group} ranks are wanted"
    if plan.kind == TWO_STEP:
        return replace(plan, scattered=op.columns)
    return plan


def rounds_to_bf16(step: Step) -> bool:
    return step.nodes[0].results[0].type.dtype is DType.BF16


def _is_search(step: Step) -> bool:
    return isinstance(step.nodes[-1].op, DIVIDED)


def _choose_searches(
    graph: StepGraph,
    padded_rows: int,
    rounds: int,
    chosen: dict[str, Collective],
    plans: dict[str, ExchangePlan],
) -> None:
    """Exchanges of the largest elements among the columns of all ranks."""
    sites = _exchange_sites(graph)
    samples = samples_of(graph)
    for step in filter(_is_search, sites):
        races = samples is not None and step.kind is StepKind.ACCEPT
        meets = rounds > 1 and len(sites) == 1 and not races
        kind = TOP_K if step.kind is StepKind.TOP_K else ARGMAX
        name = f"exchange_{kind}"
        assert name not in plans, f"{name} is used at two places"
        race = RACE if races else None
        chosen[step.id] = Collective(algorithm=kind, exchange=name, meets=meets, race=race)
        repeated = SAFE_MEETING if meets else SAFE_ALTERNATING
        plans[name] = ExchangePlan(
            name=name,
            kind=kind,
            rows=(3 if races else 2) * padded_rows,
            columns=VECTOR_LANES,
            safe_because=repeated if rounds > 1 else SAFE_ONCE,
        )
        if race is not None:
            rows = 2 * padded_batch(graph.sharded.graph.batch)
            plans[race] = replace(plans[name], name=race, rows=rows)


def _choose_walks(
    graph: StepGraph, chosen: dict[str, Collective], plans: dict[str, ExchangePlan]
) -> None:
    """Exchanges of a walk's choices, whose rows use two sets of buffers in turn."""
    for step in (one for one in _exchange_sites(graph) if one.kind is StepKind.MARKOV_WALK):
        assert step.id not in chosen and TURNS[0] not in plans, "two walks share their buffers"
        turns = TURNS[: graph.sharded.graph.rows_per_sequence - 1]
        chosen[step.id] = Collective(algorithm=ARGMAX, exchange=TURNS[0], turns=turns)
        for name in turns:
            plans[name] = ExchangePlan(
                name=name,
                kind=ARGMAX,
                rows=2 * padded_batch(graph.sharded.graph.batch),
                columns=VECTOR_LANES,
                safe_because=SAFE_ALTERNATING,
            )


def _gathering(graph: StepGraph, step: Step) -> int:
    """Ranks of the groups that gather among themselves, 0 when all ranks do."""
    op = step.nodes[0].op
    return op.ranks if isinstance(op, AllGather) and op.ranks < graph.sharded.ranks else 0


def _exchange_sites(graph: StepGraph) -> list[Step]:
    """Steps in which ranks exchange something; of two parts of an exchange the second."""
    return [
        step
        for step in graph.steps()
        if (step.kind in NEIGHBOURS and step.part is not Part.START)
        or isinstance(step.nodes[-1].op, (*DIVIDED, ShardedMarkovWalk))
    ]


@dataclass(kw_only=True)
class _Neighbours:
    """Exchanges that may follow one another, by step id; loops close on themselves.

    Exchanges within groups do not count as something in between: they say nothing of how far the
    ranks of other groups are.
    """

    ranks: int
    of: dict[str, set[str]] = field(default_factory=dict)

    def visit(self, body: tuple[Step | StepLoop, ...]) -> tuple[list[str], list[str], bool]:
        """Adds the neighbours in a body.

        Returns:
          The exchanges up to the first one of all ranks, those from the last one of all ranks on,
          and whether there is one.
        """
        first: list[str] = []
        last: list[str] = []
        closed = False
        for item in body:
            if isinstance(item, StepLoop):
                entry, exit, closes = self.visit(item.body)
                if item.count > 1:
                    self.join(exit, entry)
            elif item.kind in NEIGHBOURS and item.part is not Part.START:
                entry = exit = [item.id]
                closes = not self._within_groups(item)
            else:
                continue
            self.join(last, entry)
            first = first if closed else [*first, *entry]
            last = exit if closes else [*last, *exit]
            closed = closed or closes
        return first, last, closed

    def _within_groups(self, step: Step) -> bool:
        op = step.nodes[0].op
        return isinstance(op, AllGather) and op.ranks < self.ranks

    def join(self, before: list[str], after: list[str]) -> None:
        for one, other in product(before, after):
            self.of.setdefault(one, set()).add(other)
            self.of.setdefault(other, set()).add(one)
