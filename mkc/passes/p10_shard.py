"""Pass 10: shards the graph over the mesh and inserts the exchanges.

Values start replicated. A projection of a replicated value is divided by its output units (column
parallel), a projection of a divided value by its input units (row parallel), whose partial results
an all-reduce sums. Everything between keeps its operands' division: heads never talk to each other.
Each op type has a SHARD facet: (op, operand shardings, context) -> `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from math import gcd
from typing import ClassVar

from mkc.errors import ShardingError
from mkc.errors import UnsupportedOpError
from mkc.ir import ops
from mkc.ir.facets import INFER
from mkc.ir.facets import SHARD
from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from mkc.passes.expert_layout import choose_expert_groups
from mkc.passes.gathering import choose_gathered
from mkc.passes.gathering import join_gathers
from mkc.passes.joined_sums import join_sums
from mkc.passes.p05_untie import Untie
from mkc.passes.rank_ops import AllGather
from mkc.passes.scattered_sums import scatter_sums
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.schedule.decisions import DecisionLog
from mkc.targets import Target

NOTHING: Mapping[str, int] = {}
MAX_RANKS_LISTED = 64  # mesh sizes tried for the advice in an error


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a facet answers.

    Attributes:
      operands: required sharding of every operand; parameters take it, values must have it.
      states: sharding of every state.
      results: sharding of every result.
      op: the op to use on a rank, None for the same.
      part: what a rank computes of the only result, which an exchange then gathers.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    states: tuple[Sharding, ...] = ()
    op: ops.Op | None = None
    part: Sharding | None = None


@dataclass(frozen=True, kw_only=True)
class ShardContext:
    """What a facet may look at: the node, the full operand and result types, the mesh size.

    Attributes:
      gathered: parameters that are divided though their result is needed as a whole, and over how
        many adjoining ranks.
      expert_groups: groups of ranks that experts are divided over, by their first matrix.
    """

    node: Node
    types: tuple[TensorType, ...]
    state_types: tuple[TensorType, ...]
    ranks: int
    divide_units: Callable[[TensorType, int, str], Sharding]
    gathered: Mapping[str, int]
    expert_groups: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Divides a graph over `ranks` devices.

    Attributes:
      gather_all: weights whose result every rank needs are divided and gathered wherever that is
        possible, not only where it is predicted to be faster.
    """

    name: ClassVar[str] = "shard"
    ranks: int
    gather_all: bool = False

    def apply(
        self,
        graph: Graph,
        log: DecisionLog,
        *,
        target: Target | None = None,
        like: ShardedGraph | None = None,
    ) -> ShardedGraph:
        """Returns the graph of one rank.

        Args:
          target: decides by its figures what else may be divided; None divides nothing else.
          like: another graph over the same parameters, whose choices are taken over.

        Raises:
          ShardingError: the mesh does not divide the graph.
        """
        graph = Untie().apply(graph, log)
        groups = choose_expert_groups(graph, self.ranks, target, log, like=like)
        walk, body = _divide_graph(graph, self.ranks, advise=True, groups=groups)
        gathered: dict[str, int] = {}
        if like is not None:
            gathered = {k: v for k, v in like.gathered.items() if k in graph.params}
        elif target is not None:
            gathered = choose_gathered(
                graph, walk.whole, self.ranks, target, log, every=self.gather_all
            )
        if gathered:
            walk, body = _divide_graph(
                graph, self.ranks, advise=True, groups=groups, gathered=gathered
            )
            body = join_gathers(body)
        body = join_sums(body, log)
        params = {
            key: replace(param, type=walk.params.get(key, REPLICATED).local(param.type))
            for key, param in graph.params.items()
        }
        states = {
            key: replace(state, type=walk.states.get(key, REPLICATED).local(state.type))
            for key, state in graph.states.items()
        }
        local = replace(graph, body=body, params=params, states=states)
        local = scatter_sums(local, self.ranks, log)
        self._record(graph, walk, log, target)
        return ShardedGraph(
            graph=local,
            full=graph,
            ranks=self.ranks,
            params={key: walk.params.get(key, REPLICATED) for key in graph.params},
            states={key: walk.states.get(key, REPLICATED) for key in graph.states},
            gathered=gathered,
            expert_groups=groups,
        )

    def _record(self, graph: Graph, walk: _Walk, log: DecisionLog, target: Target | None) -> None:
        log.choose(
            "shard.ranks",
            passed=self.name,
            chosen=f"tensor parallel over {self.ranks}",
            because="one decode step reads every weight once, so the weights are divided evenly",
            rejected={"a copy of the model on every rank": "every rank would read all weights"},
        )
        exchange = (
            f"predicted {target.exchange_us(0, self.ranks - 1):.2f} us at least, for "
            if target
            else ""
        )
        for key in sorted(walk.whole - walk.gathered.keys()):
            log.choose(
                f"shard.whole.{key}",
                passed=self.name,
                chosen="every rank has the whole weight",
                because="its result meets a value that every rank has as a whole",
                rejected={"divide": "an all-gather of the result, which no pass inserts yet"},
            )
        for key in sorted(walk.params):
            sharding = walk.params[key]
            if sharding.copies > 1 and sharding.inner is None:
                log.choose(
                    f"shard.copies.{key}",
                    passed=self.name,
                    chosen=f"{sharding.shards} shards, each on {sharding.copies} ranks",
                    because="fewer heads than ranks; the copies save an exchange inside a layer",
                    rejected={
                        "split units": f"{exchange}an exchange inside attention, which heads that "
                        "are split over ranks need"
                    },
                )


def possible_ranks(graph: Graph) -> list[int]:
    """Mesh sizes up to `MAX_RANKS_LISTED` that divide the graph."""
    graph = Untie().apply(graph, DecisionLog())
    found = []
    for ranks in range(1, MAX_RANKS_LISTED + 1):
        groups = choose_expert_groups(graph, ranks, None, DecisionLog())
        try:
            _divide_graph(graph, ranks, advise=False, groups=groups)
        except ShardingError:
            continue
        found.append(ranks)
    return found


def _divide_graph(
    graph: Graph,
    ranks: int,
    *,
    advise: bool,
    groups: Mapping[str, int],
    gathered: Mapping[str, int] = NOTHING,
) -> tuple[_Walk, Block]:
    """Walks until all operands meet: projections whose divided result meets a whole one stay whole.

    Each round adds parameters to the whole ones, so there are few.
    """
    whole: frozenset[str] = frozenset()
    while True:
        walk = _Walk(
            graph=graph,
            ranks=ranks,
            advise=advise,
            whole=whole,
            gathered=gathered,
            expert_groups=groups,
        )
        try:
            return walk, walk.block(graph.body)
        except _MeetsWhole as found:
            if found.params <= whole:
                raise found.error() from None
            whole |= found.params


class _MeetsWhole(Exception):
    """A value that is divided because of `params` meets one that is not."""

    def __init__(self, params: frozenset[str], error: Callable[[], ShardingError]) -> None:
        super().__init__(", ".join(sorted(params)))
        self.params = params
        self.error = error


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """Units that are neither divided evenly nor copied in full; alone that is no error."""

    node: Node
    dimension: str
    part: Part
    name: str


@dataclass(kw_only=True)
class _Walk:
    """One traversal: rewrites nodes and remembers every value's sharding and full type."""

    graph: Graph
    ranks: int
    advise: bool = True
    values: dict[str, Sharding] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    params: dict[str, Sharding] = field(default_factory=dict)
    states: dict[str, Sharding] = field(default_factory=dict)
    uneven: Uneven | None = None
    whole: frozenset[str] = frozenset()
    gathered: Mapping[str, int] = field(default_factory=dict)
    expert_groups: Mapping[str, int] = field(default_factory=dict)
    # For every divided value the projections that it is divided because of.
    sources: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            self.values[value.name] = REPLICATED
            self.types[value.name] = value.type

    def block(self, block: Block) -> Block:
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                items.append(self.repeat(item))
            else:
                items.extend(self.node(item))
        return Block(items=tuple(items))

    def repeat(self, repeat: Repeat) -> Repeat:
        for carry in repeat.carries:
            self._define(carry.argument, self.values[carry.initial])
        body = self.block(repeat.body)
        carries = []
        for carry in repeat.carries:
            sharding = self.values[carry.yielded]
            if sharding != self.values[carry.argument.name]:
                last = next(node for node in reversed(list(repeat.body.nodes())))
                raise self._mismatch(last, (carry.yielded,))
            self._define(carry.result, sharding)
            carries.append(
                Carry(
                    initial=carry.initial,
                    argument=self._local(carry.argument),
                    yielded=carry.yielded,
                    result=self._local(carry.result),
                )
            )
        return replace(repeat, carries=tuple(carries), body=body)

    def node(self, node: Node) -> list[Node]:
        facet = SHARD.find(node.op)
        if facet is None:
            raise UnsupportedOpError(
                op=node.op.mnemonic,
                facet="sharding rule",
                location=node.location,
            )
        context = ShardContext(
            node=node,
            types=tuple(self._type(name) for name in node.operands),
            state_types=tuple(self.graph.states[key].type for key in node.states),
            ranks=self.ranks,
            divide_units=self._divide(node),
            gathered=self.gathered,
            expert_groups=self.expert_groups,
        )
        operands = tuple(self.values.get(name) for name in node.operands)
        rule: Rule = facet(node.op, operands, context)
        for name, sharding in zip(node.operands, rule.operands, strict=True):
            self._require(node, name, sharding)
        for key, sharding in zip(node.states, rule.states, strict=True):
            self.states[key] = sharding
        return self._rewrite(node, rule)

    def _rewrite(self, node: Node, rule: Rule) -> list[Node]:
        op = rule.op or node.op
        sources = frozenset[str]().union(*(self.sources.get(name, ()) for name in node.operands))
        if isinstance(node.op, ops.Linear):
            sources = frozenset((node.operands[1],))
        elif all(name in self.graph.params for name in node.operands):
            sources = frozenset(node.operands)
        for value, sharding in zip(node.results, rule.results, strict=True):
            self._define(value, sharding)
            if sharding.axis is not None:
                self.sources[value.name] = sources
        if rule.part is not None:
            return self._gathered(node, op, rule.part)
        if not rule.results or not rule.results[0].partial:
            results = tuple(self._local(value) for value in node.results)
            return [replace(node, op=op, results=results)]
        # A row-parallel projection: the partial sum gets a new name, the all-reduce the old one.
        (value,) = node.results
        partial = Value(name=f"{value.name}.partial", type=replace(value.type, dtype=DType.F32))
        self.values[value.name] = REPLICATED
        reduce_op = ops.AllReduce(ranks=self.ranks, dtype=value.type.dtype)
        return [
            replace(node, op=op, results=(partial,)),
            Node(op=reduce_op, operands=(partial.name,), results=(value,), location=node.location),
        ]

    def _gathered(self, node: Node, op: ops.Op, part: Sharding) -> list[Node]:
        """The rank's part of the result gets a new name, the gathered result the old one."""
        (value,) = node.results
        own = Value(name=f"{value.name}.part", type=part.local(value.type))
        gather = AllGather(ranks=part.shards)
        return [
            replace(node, op=op, results=(own,)),
            Node(op=gather, operands=(own.name,), results=(value,), location=node.location),
        ]

    def _type(self, name: str) -> TensorType:
        return self.graph.params[name].type if name in self.graph.params else self.types[name]

    def _define(self, value: Value, sharding: Sharding) -> None:
        self.values[value.name] = sharding
        self.types[value.name] = value.type

    def _local(self, value: Value) -> Value:
        return replace(value, type=self.values[value.name].local(value.type))

    def _require(self, node: Node, name: str, sharding: Sharding) -> None:
        if name in self.graph.params:
            known = self.params.setdefault(name, sharding)
            assert known == sharding, f"{name} is used with two shardings"
            return
        if self.values[name] != sharding:
            inputs = {value.name for value in self.graph.inputs}  # never divided
            computed = self.values.keys() - inputs
            values = [one for one in node.operands if one in computed]
            raise self._mismatch(node, values)

    def _mismatch(self, node: Node, names: Sequence[str]) -> Exception:
        """Values that are divided differently; when heads do not divide that is the error."""
        axes = [
            one
            for name in names
            for one in self._type(name).axes[1:]
            if any(part.copyable and part.count % self.ranks for part in one.parts)
        ]
        last = self._type(names[0]).axes[-1]
        axis = min(axes, key=lambda one: one.units, default=last)

        def error() -> ShardingError:  # its advice takes as long as many walks
            return self._error(node, axis.name or "last axis", axis, "")

        divided = frozenset[str]().union(*(self.sources.get(name, ()) for name in names))
        return error() if axes or self.uneven else _MeetsWhole(divided, error)

    def _divide(self, node: Node) -> Callable[[TensorType, int, str], Sharding]:
        def divide_units(type: TensorType, axis: int, param: str) -> Sharding:
            """All ranks different when the units allow it, else copies of heads."""
            parts = type.axes[axis].parts
            dimension = type.axes[axis].name or ("output rows", "input columns")[min(axis, 1)]
            shards = gcd(self.ranks, *(part.count for part in parts))
            if self.ranks == 1 or param in self.whole:
                return REPLICATED
            if shards == self.ranks or all(part.copyable for part in parts):
                uneven = (one for one in parts if one.count % self.ranks and self.ranks % one.count)
                part = next(uneven, None)
                if part is not None and self.uneven is None:
                    self.uneven = Uneven(node=node, dimension=dimension, part=part, name=param)
                copies = self.ranks // shards
                return (
                    Sharding(axis=axis, shards=shards, copies=copies) if shards > 1 else REPLICATED
                )
            raise self._error(node, dimension, type.axes[axis], param)

        return divide_units

    def _error(self, node: Node, dimension: str, axis: Axis, name: str) -> ShardingError:
        """The first heads that do not divide are the reason when operands do not meet later on."""
        worst = next((part for part in axis.parts if part.count % self.ranks), axis.parts[0])
        found = self.uneven or Uneven(node=node, dimension=dimension, part=worst, name=name)
        return ShardingError(
            op=found.node.op.mnemonic,
            dimension=found.dimension,
            units=found.part.count,
            unit=found.part.unit,
            tp=self.ranks,
            possible=possible_ranks(self.graph) if self.advise else (),
            location=found.node.location,
            param=found.name if found.name in self.graph.params else "",
        )


def infer_local(graph: Graph) -> None:
    """Checks that local types are what shape inference gives for the local operands."""
    types = {value.name: value.type for value in graph.inputs}
    _infer_block(graph, graph.body, types)


def _infer_block(graph: Graph, block: Block, types: dict[str, TensorType]) -> None:
    for item in block.items:
        if isinstance(item, Repeat):
            types.update({carry.argument.name: carry.argument.type for carry in item.carries})
            _infer_block(graph, item.body, types)
            types.update({carry.result.name: carry.result.type for carry in item.carries})
            continue
        operands = tuple(
            graph.params[name].type if name in graph.params else types[name]
            for name in item.operands
        )
        facet = INFER.find(item.op)
        assert facet is not None, f"{item.op.mnemonic} has no shape inference"
        inferred = facet(item.op, operands, tuple(graph.states[key].type for key in item.states))
        for value, type in zip(item.results, inferred, strict=True):
            assert value.type.shape == type.shape, (
                f"{item.op.mnemonic} at {item.location}: local type {value.type}, inferred {type}"
            )
            types[value.name] = value.type
