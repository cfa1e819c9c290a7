"""Pass 70: writes the program: every step becomes a phase, streams are waited for and advanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkc.errors import UnsupportedGraphError
from mkc.ir import ops
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.passes.expert_places import expert_step
from mkc.passes.expert_places import plan_name
from mkc.passes.expert_places import route_node
from mkc.passes.lifetimes import external_operands
from mkc.passes.lower_rounds import round_phase
from mkc.passes.lower_rounds import round_plan
from mkc.passes.lower_rounds import scalar_table
from mkc.passes.operands import kernel_operands
from mkc.passes.operands import table_operands
from mkc.passes.p30_tile import Tiles
from mkc.passes.p40_collectives import Collectives
from mkc.passes.p50_residency import Residency
from mkc.passes.p60_prefetch import Prefetched
from mkc.passes.rank_ops import PackedLatentAttention
from mkc.passes.rank_ops import ScatteredSum
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.exchange_plan import Part
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Piece
from mkc.schedule.program import Product
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.stream_plans import TapePlan
from mkc.targets import Target


@dataclass(frozen=True, kw_only=True)
class Lower:
    """Builds the program of one rank.

    Attributes:
      logits: the kernel also returns the logits.
      rounds: decode steps one launch may run; 1 for a kernel of one step.
    """

    name: ClassVar[str] = "lower"
    logits: bool = False
    rounds: int = 1

    def apply(
        self,
        graph: StepGraph,
        tiles: Tiles,
        collectives: Collectives,
        residency: Residency,
        prefetched: Prefetched,
        padded_rows: int,
        target: Target,
    ) -> Program:
        lowering = _Lowering(
            graph=graph,
            tiles=tiles,
            collectives=collectives,
            residency=residency,
            prefetched=prefetched,
        )
        body = lowering.body(graph.body)
        local = graph.sharded.graph
        streams = residency.streams
        logits = local.outputs.get("logits")
        return Program(
            name=local.name,
            scheme=local.metadata.get("scheme", "none"),
            ranks=graph.sharded.ranks,
            batch=local.batch,
            rows=local.rows,
            padded_rows=padded_rows,
            context=local.context,
            operands=kernel_operands(graph, tiles, residency, self.rounds, padded_rows),
            buffers=residency.buffers,
            streams=streams.streams,
            caches=streams.caches,
            exchanges=collectives.exchanges,
            tape=TapePlan(
                rows=tiles.rows,
                slots=residency.slots,
                slot_rows=tiles.slot_rows,
                prologue=prefetched.prologue,
            ),
            pages=streams.pages,
            body=body,
            logits=lowering.view(logits) if self.logits and logits else None,
            logits_whole=bool(logits) and logits in _whole_outputs(graph),
            rounds_per_launch=self.rounds,
            vmem_limit_bytes=target.vmem.total_bytes,
            scalars=scalar_table(graph),
            experts=residency.experts,
            expert_rings=residency.expert_rings,
            round=round_plan(graph, lowering.view),
        )


@dataclass(kw_only=True)
class _Lowering:
    """Turns steps into phases."""

    graph: StepGraph
    tiles: Tiles
    collectives: Collectives
    residency: Residency
    prefetched: Prefetched

    def view(self, name: str) -> View:
        """Buffer lanes of a value."""
        alias = self.graph.resolve(name)
        base = self.residency.views[alias.base]
        return View(buffer=base.buffer, start=base.start + alias.start, width=alias.width)

    def body(self, body: tuple[Step | StepLoop, ...]) -> tuple[Phase | Loop, ...]:
        """Phases of a block, between the wait for its page and the release of it.

        A weight that only one step reads is waited for and released around that step.
        """
        phases: list[Phase | Loop] = []
        own = {item.id for item in body if isinstance(item, Step)}
        streams = [
            name
            for table in (
                self.residency.streams.page_of,
                self.residency.streams.narrow_of,
            )
            for name in dict.fromkeys(table[step] for step in table if step in own)
        ]
        phases += [_wait(name) for name in streams]
        for item in body:
            if isinstance(item, StepLoop):
                inner = self.body(item.body)
                phases.append(Loop(name=item.name, count=item.count, body=inner))
            elif matrix := self.residency.streams.matrix_of.get(item.id):
                phases += [_wait(matrix), self.phase(item), _advance(matrix)]
            else:
                phases.append(self.phase(item))
        phases += [_advance(name) for name in streams]
        return tuple(phases)

    def phase(self, step: Step) -> Phase:
        build = {
            StepKind.EMBED: self.embed,
            StepKind.MATMUL: self.matmul,
            StepKind.NARROW_MATMUL: self.narrow,
            StepKind.VECTOR: self.vector,
            StepKind.DELTA_RULE: self.delta_rule,
            StepKind.ATTENTION: self.attention,
            StepKind.ALL_REDUCE: self.all_reduce,
            StepKind.ARGMAX: self.argmax,
            StepKind.BLOCKS: self.blocks,
            StepKind.LATENT_ATTENTION: self.latent_attention,
            StepKind.ROUTE: self.route,
            StepKind.EXPERTS: self.experts,
        }.get(step.kind)
        return build(step) if build else round_phase(self, step, title(step))

    def embed(self, step: Step) -> Phase:
        (node,) = step.nodes
        return EmbedPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            source=self.graph.scalars.get(node.operands[0], node.operands[0]),
            table=table_operands(self.graph)[node.operands[1]],
            param=node.operands[1],
            output=self.view(node.results[0].name),
        )

    def pieces(self, step: Step) -> tuple[Piece, ...]:
        pieces = []
        column = 0
        for node in step.nodes:
            width = self.graph.sharded.graph.params[node.operands[1]].type.shape[0]
            pieces.append(Piece(param=node.operands[1], column=column, width=width))
            column += width
        return tuple(pieces)

    def matmul(self, step: Step) -> Phase:
        node = step.nodes[0]
        tiling = self.tiles.tilings[step.id]
        first, *also = (
            Product(left=self.view(nodes[0].operands[0]), output=self.view(output))
            for nodes, output in step.products
        )
        return MatmulPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            left=first.left,
            output=first.output,
            K=tiling.K,
            columns=tiling.columns,
            blocks=tiling.blocks,
            blocks_per_step=tiling.blocks_per_step,
            loads_per_step=tiling.loads_per_step,
            rounded_columns=self.rounded_columns(step),
            pieces=self.pieces(step),
            runs=self.prefetched.runs[step.id],
            also=tuple(also),
        )

    def rounded_columns(self, step: Step) -> int:
        """Columns whose results are bf16; they lie in front of the others."""
        widths = (self.view(node.results[0].name).width for node in step.nodes if _rounds(node))
        return sum(widths)

    def narrow(self, step: Step) -> Phase:
        node = step.nodes[0]
        output = step.output if len(step.nodes) > 1 else node.results[0].name
        params = self.graph.sharded.graph.params
        return NarrowMatmulPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            left=self.view(node.operands[0]),
            output=self.view(output),
            stream=self.residency.streams.narrow_of[step.id],
            K=params[node.operands[1]].type.shape[1],
            columns=self.graph.widths[output],
            rounds=_rounds(node),
            pieces=self.pieces(step),
        )

    def vector(self, step: Step) -> Phase:
        streams = self.residency.streams
        reads = {name: self.view(name) for name in external_operands(self.graph, step)}
        writes = {
            value.name: self.view(value.name)
            for node in step.nodes
            for value in node.results
            if value.name in self.residency.views
        }
        return VectorPhase(
            id=step.id,
            title=title(step),
            location=step.nodes[0].location,
            page=streams.page_of.get(step.id, ""),
            nodes=step.nodes,
            states={key: streams.state_of[key] for node in step.nodes for key in node.states},
            reads=reads,
            writes=writes,
            scalars={
                name: self.graph.scalars[name]
                for node in step.nodes
                for name in (*node.operands, *_rests(node))
                if name in self.graph.scalars
            },
        )

    def delta_rule(self, step: Step) -> Phase:
        (node,) = step.nodes
        q, k, v, beta, decay = (self.view(name) for name in node.operands)
        heads, keys, values = self.graph.sharded.graph.states[node.states[0]].type.shape
        return DeltaRulePhase(
            id=step.id,
            title=title(step),
            location=node.location,
            stream=self.residency.streams.state_of[node.states[0]],
            q=q,
            k=k,
            v=v,
            beta=beta,
            decay=decay,
            output=self.view(node.results[0].name),
            key_heads=q.width // keys,
            value_heads=heads,
            key_dim=keys,
            value_dim=values,
            channels=decay.width != beta.width,
            rounds=_rounds(node),
        )

    def blocks(self, step: Step) -> Phase:
        (node,) = step.nodes
        views = [self.view(one.name) for one in node.results]
        counter = f"{views[0].buffer}_offers"
        if isinstance(node.op, ResidualBlocks):
            return ClearBlocksPhase(
                id=step.id,
                title=title(step),
                location=node.location,
                blocks=views[0],
                count=views[1],
                counter=counter,
            )
        assert isinstance(node.op, StoreBlock)
        return StoreBlockPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            blocks=views[0],
            count=views[1],
            counter=counter,
            residual=views[2],
            slots=node.results[0].type.shape[1],
            period=node.op.period,
        )

    def attention(self, step: Step) -> Phase:
        (node,) = step.nodes
        assert isinstance(node.op, ops.Attention)
        _, kv_heads, dim = self.graph.sharded.graph.states[node.states[0]].type.shape
        q, k, v = (self.view(name) for name in node.operands[:3])
        return AttentionPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            cache=self.residency.streams.cache_of[node.states[0]],
            q=q,
            k=k,
            v=v,
            output=self.view(node.results[0].name),
            heads=q.width // dim,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=node.op.scale,
            rounds=node.results[0].type.dtype is DType.BF16,
        )

    def latent_attention(self, step: Step) -> Phase:
        (node,) = step.nodes
        assert isinstance(node.op, PackedLatentAttention)
        q, latent, shared = (self.view(name) for name in node.operands[:3])
        _, heads, value_dim = node.results[0].type.shape
        return LatentAttentionPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            cache=self.residency.streams.cache_of[node.states[0]],
            up=self.residency.streams.matrix_of[step.id],
            positions=self.graph.scalars.get(node.operands[4], node.operands[4]),
            q=q,
            latent=latent,
            shared=shared,
            output=self.view(node.results[0].name),
            heads=heads,
            key_dim=node.op.key_dim,
            shared_dim=node.op.shared_dim,
            value_dim=value_dim,
            scale=node.op.scale,
            rounds=_rounds(node),
        )

    def route(self, step: Step) -> Phase:
        (node,) = step.nodes
        op = route_node(step)
        chosen = expert_step(self.graph, step)
        if chosen is None:
            raise UnsupportedGraphError(
                op=op.mnemonic,
                location=node.location,
                problem="the kernel loads experts when it has chosen them, and no mixture of "
                "experts, or more than one, takes this choice",
                hint="Pass the ids of one mkc.route to one mkc.expert_mlp",
            )
        ids, weights = (self.view(one.name) for one in node.results)
        return RoutePhase(
            id=step.id,
            title=title(step),
            location=node.location,
            experts=plan_name(chosen),
            page=self.residency.streams.page_of.get(step.id, ""),
            bias=node.operands[1] if len(node.operands) > 1 else "",
            logits=self.view(node.operands[0]),
            ids=ids,
            weights=weights,
            k=op.k,
            score=op.score,
            renormalise=op.renormalise,
            factor=op.scale,
        )

    def experts(self, step: Step) -> Phase:
        (node,) = step.nodes
        assert isinstance(node.op, ExpertMlp)
        x, ids, weights = (self.view(name) for name in node.operands[:3])
        return ExpertsPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            experts=plan_name(step),
            x=x,
            ids=ids,
            weights=weights,
            output=self.view(node.results[0].name),
            gate_cap=node.op.gate_cap,
            up_cap=node.op.up_cap,
            rounds=_rounds(node),
        )

    def all_reduce(self, step: Step) -> Phase:
        (node,) = step.nodes
        choice = self.collectives.steps[step.id]
        return AllReducePhase(
            id=step.id,
            title=title(step),
            location=node.location,
            algorithm=choice.algorithm,
            exchange=choice.exchange,
            partial=self.view(node.operands[0]),
            output=self.view(node.results[0].name),
            meets=choice.meets,
            rounds=_rounds(node),
            part=step.part,
            scattered=node.op.columns if isinstance(node.op, ScatteredSum) else 0,
            group=node.op.group if isinstance(node.op, ScatteredSum) else 0,
        )

    def argmax(self, step: Step) -> Phase:
        node = step.nodes[-1]
        choice = self.collectives.steps.get(step.id)
        logits = self.view(node.operands[0])
        return ArgmaxPhase(
            id=step.id,
            title=title(step),
            location=node.location,
            logits=logits,
            columns=logits.width,
            masks=step.masks,
            exchange=choice.exchange if choice else None,
            meets=choice.meets if choice else False,
        )


def _wait(stream: str) -> Phase:
    return StreamWaitPhase(id=f"{stream}_wait", title="wait", stream=stream)


def _advance(stream: str) -> Phase:
    return StreamAdvancePhase(id=f"{stream}_advance", title="advance", stream=stream)


def _whole_outputs(graph: StepGraph) -> set[str]:
    """Output values of which every rank has all columns."""
    full = _types(graph.sharded.full)
    local = _types(graph.sharded.graph)
    names = graph.sharded.graph.outputs.values()
    return {name for name in names if full[name].shape == local[name].shape}


def _types(graph: Graph) -> dict[str, TensorType]:
    return {value.name: value.type for node in graph.body.nodes() for value in node.results}


def title(step: Step) -> str:
    """What a step does, for people: its ops, and the parameters of a projection."""
    if step.kind in (StepKind.MATMUL, StepKind.NARROW_MATMUL):
        return "linear " + ", ".join(node.operands[1] for node in step.nodes)
    ops = ", ".join(dict.fromkeys(node.op.mnemonic for node in step.nodes))
    return ops if step.part is Part.WHOLE else f"{ops}, {step.part}"


def _rests(node: Node) -> tuple[str, ...]:
    """The input that a node reads to see which sequences rest, besides its operands."""
    return ("positions",) if node.states else ()


def _rounds(node: Node) -> bool:
    return node.results[0].type.dtype is DType.BF16
