"""Phases of speculative rounds, and the plan by which rounds follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mkc.ir import ops
from mkc.ir import ops_spec
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.types import DType
from mkc.passes.operands import table_operands
from mkc.passes.p40_collectives import Collectives
from mkc.passes.p50_residency import Residency
from mkc.passes.sampled import FORCED_SCALARS
from mkc.passes.sampled import OPTIONS
from mkc.passes.sampled import samples_of
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.schedule.program import Phase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import Remembered
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SampledAccept
from mkc.schedule.round_phases import SampledWalk
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.scalars import Carried
from mkc.schedule.scalars import CarriedRows
from mkc.schedule.scalars import RoundPlan
from mkc.schedule.scalars import ScalarArray


class Lowering(Protocol):
    """What the phases are made from."""

    graph: StepGraph
    collectives: Collectives
    residency: Residency

    def view(self, name: str) -> View:
        """Buffer lanes of a value."""


def scalar_table(graph: StepGraph) -> tuple[ScalarArray, ...]:
    """The arrays of all scalar values of a round, inputs first."""
    local = graph.sharded.graph
    sizes = {value.name: value.type.shape[0] for value in local.inputs}
    for node in local.body.nodes():
        sizes.update({one.name: one.type.shape[0] for one in node.results if one.type.shape})
    return tuple(
        ScalarArray(name=name, value=value, size=sizes[value])
        for value, name in graph.scalars.items()
    )


def round_plan(graph: StepGraph, view: Callable[[str], View]) -> RoundPlan | None:
    """How rounds follow one another; None for the graph of a plain step.

    Args:
      view: buffer lanes of a value.
    """
    if not graph.scalars:
        return None
    local, arrays = graph.sharded.graph, graph.scalars
    carried = [value.name for value in local.inputs if value.name in arrays]
    samples = samples_of(graph)
    return RoundPlan(
        rows_per_sequence=local.rows_per_sequence,
        tokens=arrays["tokens"],
        positions=arrays["positions"],
        kept=arrays["kept"],
        emitted=arrays[local.outputs["emitted"]],
        count=arrays[local.outputs["count"]],
        carried=tuple(
            Carried(target=arrays[name], source=arrays[local.outputs[name]]) for name in carried
        ),
        rows=tuple(
            CarriedRows(target=name, source=view(local.outputs[name]))
            for name in (samples.proposed if samples else ())
        ),
        forced=FORCED_SCALARS if samples else "",
    )


def round_phase(lowering: Lowering, step: Step, title: str) -> Phase:
    """The phase of a step that only rounds have."""
    build: Callable[[Lowering, Step, str], Phase] = {
        StepKind.KEPT_DELTA_RULE: _kept_delta_rule,
        StepKind.ROWS_ATTENTION: _rows_attention,
        StepKind.TAP: _tap,
        StepKind.ALL_GATHER: _all_gather,
        StepKind.TOP_K: _top_k,
        StepKind.ACCEPT: _accept,
        StepKind.SELECTOR_WALK: _selector_walk,
        StepKind.MARKOV_WALK: _markov_walk,
        StepKind.CUT_DRAFTS: _cut_drafts,
        StepKind.SCALAR: _scalar,
    }[step.kind]
    return build(lowering, step, title)


def _kept_delta_rule(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    q, k, v, beta, decay = (lowering.view(name) for name in node.operands[:5])
    local = lowering.graph.sharded.graph
    heads, keys, values = local.states[node.states[0]].type.shape
    streams = lowering.residency.streams.state_of
    scalars = lowering.graph.scalars
    return KeptDeltaRulePhase(
        id=step.id,
        title=title,
        location=node.location,
        state=streams[node.states[0]],
        kept_k=streams[node.states[1]],
        kept_u=streams[node.states[2]],
        kept_decay=streams[node.states[3]],
        kept=scalars[node.operands[5]],
        positions=scalars["positions"],
        q=q,
        k=k,
        v=v,
        beta=beta,
        decay=decay,
        output=lowering.view(node.results[0].name),
        key_heads=q.width // keys,
        value_heads=heads,
        key_dim=keys,
        value_dim=values,
        channels=decay.width != beta.width,
        rounds=node.results[0].type.dtype is DType.BF16,
    )


def _rows_attention(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    op = node.op
    assert isinstance(op, ops.Attention | ops_spec.BlockAttention), op
    local, scalars = lowering.graph.sharded.graph, lowering.graph.scalars
    _, kv_heads, dim = local.states[node.states[0]].type.shape
    q, k, v = (lowering.view(name) for name in node.operands[:3])
    remembered = None
    if isinstance(op, ops_spec.BlockAttention):
        remembered = Remembered(
            k=lowering.view(node.operands[4]),
            v=lowering.view(node.operands[5]),
            positions=scalars[node.operands[6]],
        )
    return RowsAttentionPhase(
        id=step.id,
        title=title,
        location=node.location,
        cache=lowering.residency.streams.cache_of[node.states[0]],
        first=scalars["positions"],
        positions=scalars[node.operands[3]],
        q=q,
        k=k,
        v=v,
        remembered=remembered,
        output=lowering.view(node.results[0].name),
        heads=q.width // dim,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=op.scale,
        causal=True if isinstance(op, ops.Attention) else op.causal,
        window=None if isinstance(op, ops.Attention) else op.reach,
        anchored=isinstance(op, ops_spec.BlockAttention) and op.anchored,
        rounds=node.results[0].type.dtype is DType.BF16,
    )


def _tap(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    (key,) = node.states
    local = lowering.graph.sharded.graph
    reader = next(
        one
        for one in local.body.nodes()
        if isinstance(one.op, ops_spec.ReadTaps) and key in one.states
    )
    assert isinstance(reader.op, ops_spec.ReadTaps)
    number = reader.states.index(key)
    places = {
        instance: place
        for place, (state, instance) in enumerate(
            zip(reader.op.numbers, reader.op.instances, strict=True)
        )
        if state == number
    }
    unread = len(reader.op.layers)
    instances = local.states[key].instances
    return TapPhase(
        id=step.id,
        title=title,
        location=node.location,
        counter=f"taps_{step.id}",
        source=lowering.view(node.operands[0]),
        buffer=lowering.view(step.output).buffer,
        width=reader.op.width,
        places=tuple(places.get(instance, unread) for instance in range(instances)),
    )


def _all_gather(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    choice = lowering.collectives.steps[step.id]
    return AllGatherPhase(
        id=step.id,
        title=title,
        location=node.location,
        algorithm=choice.algorithm,
        exchange=choice.exchange,
        parts=tuple(lowering.view(name) for name in node.operands),
        outputs=tuple(lowering.view(value.name) for value in node.results),
        meets=choice.meets,
        part=step.part,
    )


def _top_k(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    assert isinstance(node.op, ops_spec.TopK)
    choice = lowering.collectives.steps.get(step.id)
    logits = lowering.view(node.operands[0])
    values, ids = (lowering.view(value.name) for value in node.results)
    return TopKPhase(
        id=step.id,
        title=title,
        location=node.location,
        logits=logits,
        columns=logits.width,
        k=node.op.k,
        values=values,
        ids=ids,
        exchange=choice.exchange if choice else None,
        meets=choice.meets if choice else False,
    )


def _accept(lowering: Lowering, step: Step, title: str) -> Phase:
    node = step.nodes[-1]
    choice = lowering.collectives.steps.get(step.id)
    logits = lowering.view(node.operands[0])
    scalars = lowering.graph.scalars
    emitted, count, last = (scalars[value.name] for value in node.results)
    samples = samples_of(lowering.graph)
    sampling = None
    if samples is not None:
        options = dict(zip(OPTIONS, samples.options, strict=True))
        candidates, proposal = (f"{name}_rows" for name in samples.proposed or ("", ""))
        sampling = SampledAccept(
            **options,
            forced=FORCED_SCALARS,
            candidates=candidates if samples.proposed else "",
            proposal=proposal if samples.proposed else "",
            k=samples.k,
            listed=samples.listed,
            race=choice.race if choice else None,
        )
    return AcceptPhase(
        id=step.id,
        title=title,
        location=node.location,
        logits=logits,
        columns=logits.width,
        tokens=scalars[node.operands[1]],
        positions=scalars[node.operands[2]],
        emitted=emitted,
        count=count,
        last=last,
        exchange=choice.exchange if choice else None,
        meets=choice.meets if choice else False,
        sampling=sampling,
        masks=step.masks,
    )


def _selector_walk(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    local, scalars = lowering.graph.sharded.graph, lowering.graph.scalars
    values, ids, hidden = (lowering.view(name) for name in node.operands[:3])
    predecessor, successor = node.operands[3:5]
    tables = table_operands(lowering.graph)
    sampling = None
    if len(node.operands) > 7:
        sampling = SampledWalk(
            temperature=node.operands[7],
            seed=node.operands[8],
            positions=scalars[node.operands[6]],
            proposal=lowering.view(node.results[1].name),
        )
    return SelectorWalkPhase(
        id=step.id,
        title=title,
        location=node.location,
        values=values,
        ids=ids,
        hidden=hidden,
        predecessor=tables[predecessor],
        successor=tables[successor],
        params=(predecessor, successor),
        rank=local.params[predecessor].type.shape[1],
        k=values.width,
        tokens=scalars[node.operands[5]],
        output=scalars[node.results[0].name],
        sampling=sampling,
    )


def _markov_walk(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    graph, residency = lowering.graph, lowering.residency
    logits, predecessor, _, tokens, hidden, head, bias = node.operands
    drafts, confidence = (value.name for value in node.results)
    choice = lowering.collectives.steps.get(step.id)
    values = (one for node in graph.sharded.graph.body.nodes() for one in node.results)
    types = {one.name: one.type for one in values}
    return MarkovWalkPhase(
        id=step.id,
        title=title,
        location=node.location,
        logits=lowering.view(logits),
        hidden=lowering.view(hidden),
        predecessor=table_operands(graph)[predecessor],
        param=predecessor,
        successor=residency.streams.matrix_of[step.id],
        rank=graph.sharded.graph.params[predecessor].type.shape[1],
        tokens=graph.scalars[tokens],
        output=graph.scalars[drafts],
        confidence=lowering.view(confidence) if confidence in residency.views else None,
        page=residency.streams.page_of[step.id],
        head=head,
        bias=bias,
        exchanges=choice.turns if choice else (),
        rounds=types[logits].dtype is DType.BF16,
    )


def _cut_drafts(lowering: Lowering, step: Step, title: str) -> Phase:
    (node,) = step.nodes
    assert isinstance(node.op, CutDrafts)
    positions, confidence = node.operands
    return CutDraftsPhase(
        id=step.id,
        title=title,
        location=node.location,
        confidence=lowering.view(confidence),
        positions=lowering.graph.scalars[positions],
        output=lowering.graph.scalars[node.results[0].name],
        threshold=node.op.threshold,
    )


def _scalar(lowering: Lowering, step: Step, title: str) -> Phase:
    names = [
        name
        for node in step.nodes
        for name in (*node.operands, *(value.name for value in node.results))
    ]
    return ScalarPhase(
        id=step.id,
        title=title,
        location=step.nodes[0].location,
        nodes=step.nodes,
        scalars={name: lowering.graph.scalars[name] for name in names},
    )
