"""Pass 20: cuts the graph of one rank into steps.

Projections of the same value become one matmul, so that the weight stream has few, long matrices.
Everything between two matmuls, exchanges or stateful operations becomes one vector chain. A
projection to a few columns would pad a whole weight block; its weights are kept as rows instead
(`narrow_matmul`) where that moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from itertools import count
from typing import ClassVar

from mkc.errors import UnsupportedGraphError
from mkc.ir import ops
from mkc.ir import ops_experts
from mkc.ir import ops_markov
from mkc.ir import ops_mixing
from mkc.ir import ops_spec
from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.types import DType
from mkc.passes.carries import separate_carries
from mkc.passes.mixing_parts import MixStored
from mkc.passes.mixing_parts import split_mixtures
from mkc.passes.overlap import in_order
from mkc.passes.overlap import overlapped
from mkc.passes.overlap import travelling
from mkc.passes.packed_queries import pack_queries
from mkc.passes.rank_ops import AllGather
from mkc.passes.rank_ops import PackedLatentAttention
from mkc.passes.rank_ops import ScatteredSum
from mkc.passes.rank_ops import ShardedAccept
from mkc.passes.rank_ops import ShardedExpertMlp
from mkc.passes.rank_ops import ShardedMarkovWalk
from mkc.passes.rank_ops import ShardedTopK
from mkc.passes.sharding import ShardedGraph
from mkc.passes.shared_weights import share_weights
from mkc.passes.steps import Alias
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.passes.steps import lanes
from mkc.passes.steps import python_name
from mkc.passes.steps import scalar_arrays
from mkc.passes.steps import steps_of
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import TAPE_LANES

# Names of the generated kernel that a loop's function must not hide.
RESERVED = frozenset(
    (
        "c",
        "carry",
        "count",
        "functools",
        "index",
        "jnp",
        "lax",
        "longest",
        "m",
        "running",
        "support",
        "tape",
        ROUNDS,
    )
)
NARROW_ROWS = 16  # weight rows of a narrow matmul are padded to a bf16 tile

ANCHORS: dict[type[ops.Op], StepKind] = {
    ops.Embed: StepKind.EMBED,
    ops.DeltaRule: StepKind.DELTA_RULE,
    ops.Attention: StepKind.ATTENTION,
    ops.AllReduce: StepKind.ALL_REDUCE,
    ScatteredSum: StepKind.ALL_REDUCE,
    ops.Argmax: StepKind.ARGMAX,
    ops.ShardedArgmax: StepKind.ARGMAX,
    AllGather: StepKind.ALL_GATHER,
    ops_spec.KeptDeltaRule: StepKind.KEPT_DELTA_RULE,
    ops_spec.BlockAttention: StepKind.ROWS_ATTENTION,
    ops_spec.Tap: StepKind.TAP,
    ops_spec.TopK: StepKind.TOP_K,
    ShardedTopK: StepKind.TOP_K,
    ops_spec.Accept: StepKind.ACCEPT,
    ShardedAccept: StepKind.ACCEPT,
    ops_spec.SelectorWalk: StepKind.SELECTOR_WALK,
    ops_markov.MarkovWalk: StepKind.MARKOV_WALK,
    ShardedMarkovWalk: StepKind.MARKOV_WALK,
    ops_markov.CutDrafts: StepKind.CUT_DRAFTS,
    ops_spec.KeptPositions: StepKind.SCALAR,
    ops_spec.NextPositions: StepKind.SCALAR,
    ops_spec.BlockTokens: StepKind.SCALAR,
    ops_mixing.ResidualBlocks: StepKind.BLOCKS,
    ops_mixing.StoreBlock: StepKind.BLOCKS,
    PackedLatentAttention: StepKind.LATENT_ATTENTION,
    ops_experts.Route: StepKind.ROUTE,
    ops_experts.ExpertMlp: StepKind.EXPERTS,
    ShardedExpertMlp: StepKind.EXPERTS,
}


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """Cuts a graph into steps.

    Attributes:
      narrow_columns: widest projection that may become a narrow matmul.
      overlap: exchanges have two parts where something can go on between them.
    """

    name: ClassVar[str] = "fuse"
    narrow_columns: int = 64
    overlap: bool = True

    def apply(self, sharded: ShardedGraph, log: DecisionLog) -> StepGraph:
        """Returns the steps of one rank in program order."""
        graph = pack_queries(sharded.graph)
        sharing = share_weights(split_mixtures(graph, log) if self.overlap else graph)
        sharded = replace(sharded, graph=separate_carries(sharing.graph))
        scalars = scalar_arrays(sharded.graph)
        cutter = _Cutter(
            options=self, sharded=sharded, log=log, shared=sharing.params, scalars=scalars
        )
        for value in sharded.graph.inputs:
            cutter.widths[value.name] = 1
        cutter.find_taps()
        body = cutter.block(sharded.graph.body)
        if self.narrow_columns and all(one.kind is not StepKind.MATMUL for one in steps_of(body)):
            # The tape is never empty: a model of narrow projections only streams them all the same.
            return replace(self, narrow_columns=0).apply(sharded, log)
        return StepGraph(
            sharded=sharded,
            body=_numbered(self._overlapped(body, cutter.aliases), count()),
            aliases=cutter.aliases,
            widths=cutter.widths,
            scalars=scalars,
        )

    def _overlapped(
        self, body: tuple[Step | StepLoop, ...], aliases: Mapping[str, Alias]
    ) -> tuple[Step | StepLoop, ...]:
        if not self.overlap:
            return body
        return overlapped(body, {name: alias.base for name, alias in aliases.items()})


def _numbered(
    body: tuple[Step | StepLoop, ...], numbers: Iterator[int]
) -> tuple[Step | StepLoop, ...]:
    """Gives steps their ids in program order."""
    out: list[Step | StepLoop] = []
    for item in body:
        if isinstance(item, StepLoop):
            out.append(replace(item, body=_numbered(item.body, numbers)))
        else:
            out.append(replace(item, id=f"p{next(numbers):02d}"))
    return tuple(out)


@dataclass(kw_only=True)
class _Cutter:
    """Walks blocks, collects vector nodes until something else needs them."""

    options: Fuse
    sharded: ShardedGraph
    log: DecisionLog
    shared: frozenset[str]
    scalars: dict[str, str]
    taps: dict[str, str] = field(default_factory=dict)  # state -> the value that holds all taps
    aliases: dict[str, Alias] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def block(self, block: Block) -> tuple[Step | StepLoop, ...]:
        steps: list[Step | StepLoop] = []
        pending: list[Node] = []
        done: set[int] = set()
        masks: list[Node] = []  # of the argmax that follows

        def flush() -> None:
            if pending:
                steps.append(Step(id="", kind=StepKind.VECTOR, nodes=tuple(pending)))
                pending.clear()

        for item in block.items:
            if isinstance(item, Repeat):
                flush()
                steps.append(self.loop(item))
            elif id(item) in done or self.alias(item):
                continue
            elif isinstance(item.op, ops.MaskTokens):
                masks.append(self.in_place(item))
            elif isinstance(item.op, ops_mixing.StoreBlock):
                flush()
                self.check_stored(item, block)
                stored = self.in_place(item)
                steps.append(Step(id="", kind=StepKind.BLOCKS, nodes=(stored,)))
            elif isinstance(item.op, ops.Linear):
                flush()
                group = [
                    one for one in block.items if isinstance(one, Node) and _same_input(one, item)
                ]
                second = [
                    one
                    for one in block.items
                    if isinstance(one, Node) and _second_of(one, group, self.shared)
                ]
                if any(not self.is_known(one.operands[0]) for one in second):
                    group, second = [item], []
                elif second:
                    group = [one for one in group if one.op == item.op]
                done.update(id(one) for one in (*group, *second))
                steps.extend(self.matmuls(group, second, travelling(block)))
            else:
                for value in item.results:
                    self.widths[value.name] = lanes(value.type.shape)
                self.check_lookup(item)
                kind = self.kind(item)
                if isinstance(item.op, MixStored):
                    flush()  # a step of its own can move into an exchange
                    steps.append(Step(id="", kind=StepKind.VECTOR, nodes=(item,)))
                    continue
                if kind is None:
                    pending.append(item)
                    continue
                flush()
                last = steps[-1] if steps else None
                if kind is StepKind.SCALAR and isinstance(last, Step) and last.kind is kind:
                    steps[-1] = replace(last, nodes=(*last.nodes, item))
                    continue
                output = self.taps[item.states[0]] if kind is StepKind.TAP else ""
                steps.append(Step(id="", kind=kind, nodes=(*masks, item), output=output))
                masks.clear()
        flush()
        return tuple(steps)

    def kind(self, node: Node) -> StepKind | None:
        """What a node becomes; None for a part of a vector chain."""
        if isinstance(node.op, ops.Attention) and self.scalars:
            return StepKind.ROWS_ATTENTION
        return ANCHORS.get(type(node.op))

    def is_known(self, name: str) -> bool:
        """Whether the value is computed before the step that is being made."""
        return (
            self.aliases[name].base in self.widths
            if name in self.aliases
            else (name in self.widths)
        )

    def find_taps(self) -> None:
        """What is shown lies side by side, and behind it a place for what nobody reads."""
        for node in self.sharded.graph.body.nodes():
            if not isinstance(node.op, ops_spec.ReadTaps):
                continue
            (value,) = node.results
            base = f"{value.name}.taps"
            width = lanes(value.type.shape)
            self.widths[base] = width + node.op.width
            self.aliases[value.name] = Alias(base=base, start=0, width=width)
            for key in node.states:
                assert key not in self.taps, f"{key} is read by two drafters"
                self.taps[key] = base

    def in_place(self, node: Node) -> Node:
        """The node, whose results take the places of its first operands."""
        for name, result in zip(node.operands, node.results, strict=False):
            self.aliases[result.name] = self.place_of(name)
        return node

    def check_stored(self, node: Node, block: Block) -> None:
        """Blocks and stream change in place, so nobody may read what they were before any more."""
        later = Block(items=block.items[block.items.index(node) + 1 :])
        blocks, _, stream = node.operands
        for changed, what in ((blocks, "blocks"), (stream, "stream")):
            names = self.names_of(changed)
            reader = next((one for one in later.nodes() if names & set(one.operands)), None)
            if reader is not None:
                raise UnsupportedGraphError(
                    op=node.op.mnemonic,
                    location=node.location,
                    problem=f"{reader.op.mnemonic} at {reader.location} still reads the {what} "
                    "from before; the kernel stores a block in place",
                    hint=f"Read the {what} before the next one is stored",
                )

    def names_of(self, value: str) -> set[str]:
        """Values that lie in lanes of this one, by now."""
        place = self.place_of(value)
        return {value, place.base} | {
            name
            for name, one in self.aliases.items()
            if one.base == place.base
            and one.start < place.start + place.width
            and place.start < one.start + one.width
        }

    def place_of(self, value: str) -> Alias:
        return self.aliases.get(value) or Alias(base=value, start=0, width=self.widths[value])

    def check_lookup(self, node: Node) -> None:
        """The kernel looks step inputs up, in tables that all layers share."""
        if not isinstance(node.op, ops.Embed):
            return
        graph = self.sharded.graph
        if graph.params[node.operands[1]].indices:
            raise UnsupportedGraphError(
                op=node.op.mnemonic,
                location=node.location,
                problem=f"'{node.operands[1]}' is a table of its own in every layer of a loop, "
                "which the kernel cannot look up yet",
                hint="Look it up before the layers, or in layers that do not repeat",
            )
        known = {value.name for value in graph.inputs} | self.scalars.keys()
        if node.operands[0] not in known:
            raise UnsupportedGraphError(
                op=node.op.mnemonic,
                location=node.location,
                problem=f"%{node.operands[0]} is computed in the step; the kernel looks up step "
                "inputs only",
                hint="Look up step.tokens or step.positions",
            )

    def loop(self, repeat: Repeat) -> StepLoop:
        for carry in repeat.carries:
            self.widths[carry.argument.name] = lanes(carry.argument.type.shape)
        body = self.block(repeat.body)
        for carry in repeat.carries:
            self.widths[carry.result.name] = lanes(carry.result.type.shape)
        return StepLoop(
            name=loop_name(repeat.name), count=repeat.count, carries=repeat.carries, body=body
        )

    def alias(self, node: Node) -> bool:
        """Records results that are lanes of the operand; False when the node computes something."""
        operand = node.operands[0] if node.operands else ""
        widths = [lanes(value.type.shape) for value in node.results]
        match node.op:
            case ops_spec.ReadTaps():
                return True  # found before
            case ops.SplitHeads() | ops.MergeHeads() | ops.SplitParts():
                start = 0
            case ops.Slice() as op if len(node.results[0].type.shape) == 2:
                start = op.start
            case _:
                return False
        base = self.place_of(operand)
        start += base.start
        for value, width in zip(node.results, widths, strict=True):
            self.aliases[value.name] = Alias(base=base.base, start=start, width=width)
            start += width
        return True

    def matmuls(self, group: list[Node], second: list[Node], travel: frozenset[str]) -> list[Step]:
        """One wide matmul of all wide members and one narrow matmul of the others.

        Where some results travel there may be two wide ones, those that travel in the first.
        Members whose weights the nodes of `second` read too become a wide matmul of their own.
        """
        twice = {node.operands[1] for node in second}
        # Results that are not rounded lie behind those that are.
        once = sorted((one for one in group if one.operands[1] not in twice), key=_is_exact)
        narrow = [node for node in once if self._is_narrow(node, once)]
        wide = [node for node in once if node not in narrow]
        exact = [node for node in narrow if _is_exact(node)]
        rounded = [node for node in narrow if node not in exact]
        steps = []
        parts = in_order(wide, travel, self.log) if self.options.overlap else [wide]
        for kind, nodes in (
            *((StepKind.MATMUL, part) for part in parts),
            (StepKind.NARROW_MATMUL, rounded),
            (StepKind.NARROW_MATMUL, exact),
        ):
            if nodes:
                steps.append(Step(id="", kind=kind, nodes=tuple(nodes), output=self.product(nodes)))
        if second:
            nodes = [node for node in group if node.operands[1] in twice]
            second = sorted(
                second, key=lambda one: [n.operands[1] for n in nodes].index(one.operands[1])
            )
            step = Step(
                id="",
                kind=StepKind.MATMUL,
                nodes=tuple(nodes),
                output=self.product(nodes),
                also=tuple(second),
                also_output=self.product(second),
            )
            steps.append(step)
        return steps

    def product(self, nodes: list[Node]) -> str:
        """Name of the value that holds the results of projections of one value, side by side."""
        output = "+".join(node.results[0].name for node in nodes)
        column = 0
        for node in nodes:
            width = lanes(node.results[0].type.shape)
            if len(nodes) > 1:
                self.aliases[node.results[0].name] = Alias(base=output, start=column, width=width)
            column += width
        self.widths[output] = column
        return output

    def _is_narrow(self, node: Node, group: list[Node]) -> bool:
        """True when the weights as rows move fewer bytes than the columns they would add."""
        columns = lanes(node.results[0].type.shape)
        K = self._contracted(node)
        if columns > self.options.narrow_columns or K % TAPE_LANES or self._is_partial(node):
            return False
        total = sum(lanes(one.results[0].type.shape) for one in group)
        others = sum(
            lanes(one.results[0].type.shape)
            for one in group
            if lanes(one.results[0].type.shape) > self.options.narrow_columns
        )
        extra_columns = (_blocks(total) - _blocks(others)) * TAPE_LANES
        rows = -(-(total - others) // NARROW_ROWS) * NARROW_ROWS
        names = ("weights as rows", "columns of the wide matmul")
        narrow = rows < extra_columns
        chosen, other = names if narrow else reversed(names)
        self.log.choose(
            f"fuse.narrow.{node.operands[1]}",
            passed=self.options.name,
            chosen=chosen,
            because=f"{rows * K * 2} bytes as rows, {extra_columns * K * 2} as columns",
            rejected={other: "no fewer bytes"},
        )
        return narrow

    def _contracted(self, node: Node) -> int:
        return self.sharded.graph.params[node.operands[1]].type.shape[1]

    def _is_partial(self, node: Node) -> bool:
        return self.sharded.params[node.operands[1]].axis == 1


def loop_name(name: str) -> str:
    """A Python name for a loop that hides nothing the generated kernel uses."""
    found = python_name(name)
    return f"{found}_loop" if found in RESERVED else found


def _same_input(one: Node, other: Node) -> bool:
    """True for projections of one value."""
    return isinstance(one.op, ops.Linear) and one.operands[0] == other.operands[0]


def _is_exact(node: Node) -> bool:
    """The result keeps its f32 sums."""
    return node.results[0].type.dtype is DType.F32


def _second_of(one: Node, group: list[Node], shared: frozenset[str]) -> bool:
    """True for another projection, of another value, with weights that the group reads too."""
    if not isinstance(one.op, ops.Linear) or one.operands[1] not in shared:
        return False
    own = {node.operands[1]: node.operands[0] for node in group}
    return own.get(one.operands[1], one.operands[0]) != one.operands[0]


def _blocks(columns: int) -> int:
    return -(-columns // TAPE_LANES)
