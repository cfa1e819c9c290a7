"""The arrays a kernel is called with."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mkc.ir.types import DType
from mkc.passes.p30_tile import Tiles
from mkc.passes.p50_residency import Residency
from mkc.passes.sampled import FORCED
from mkc.passes.sampled import samples_of
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.schedule.program import STOP_IDS
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import Operand
from mkc.schedule.program import mask_lanes


def kernel_operands(
    graph: StepGraph, tiles: Tiles, residency: Residency, rounds: int, padded_rows: int
) -> tuple[Operand, ...]:
    """In the order of the call: inputs, weights, then what the kernel updates."""
    local = graph.sharded.graph
    found = _scalar_operands(graph, rounds)
    for step in graph.steps():
        if step.masks:
            columns = graph.resolve(step.nodes[-1].operands[0]).width
            found.append(
                Operand(
                    name=step.masks,
                    role="token_masks",
                    shape=(padded_rows, mask_lanes(columns)),
                    dtype=DType.I32,
                    updated=False,
                    purpose="which tokens may follow each row, a bit for each column",
                )
            )
    found.append(
        Operand(
            name="tape",
            role="tape",
            shape=(tiles.rows, TAPE_LANES),
            dtype=DType.BF16,
            updated=False,
            purpose="streamed weights in consumption order",
        )
    )
    for key, name in table_operands(graph).items():
        rows, columns = local.params[key].type.shape
        found.append(
            Operand(
                name=name,
                role="table",
                shape=(-(-rows // 16) * 16, columns),
                dtype=DType.BF16,
                updated=False,
                purpose=key,
                param=key,
            )
        )
    streams = residency.streams
    for stream in streams.streams:
        if not stream.writes_back:
            param = streams.matrices.get(stream.name, "")
            role = "page" if stream.name in streams.pages else "matrix" if param else "narrow"
            found.append(
                Operand(
                    name=stream.array,
                    role=role,
                    shape=(stream.items, *stream.item_shape),
                    dtype=stream.dtype,
                    updated=False,
                    purpose=stream.purpose,
                    param=param,
                )
            )
    rings = {one.name: one for one in residency.expert_rings}
    for plan in residency.experts:
        held = rings[plan.ring].slice
        for array, entry in ((plan.gate_up_array, held.gate_up), (plan.down_array, held.down)):
            found.append(
                Operand(
                    name=array,
                    role="experts",
                    shape=(plan.layers * plan.local, *entry),
                    dtype=held.dtype,
                    updated=False,
                    purpose="matrices of experts, an entry for each layer and expert",
                )
            )
    for stream in streams.streams:
        if stream.writes_back:
            found.append(
                Operand(
                    name=stream.array,
                    role="state",
                    shape=(stream.items, *stream.item_shape),
                    dtype=stream.dtype,
                    updated=True,
                    purpose=stream.purpose,
                )
            )
    for cache in streams.caches:
        arrays = ((cache.key_array, "keys"), (cache.value_array, "values"))
        for (array, what), width in zip(arrays, cache.widths, strict=True):
            shape = (cache.layers, cache.batch, cache.context, width)
            found.append(
                Operand(
                    name=array,
                    role="cache",
                    shape=shape,
                    dtype=DType.BF16,
                    updated=True,
                    purpose=what,
                )
            )
    return (*found, *_carried_rows(graph, padded_rows))


def _carried_rows(graph: StepGraph, padded_rows: int) -> Iterator[Operand]:
    """What rounds that sample carry on as rows."""
    samples = samples_of(graph)
    types = {value.name: value.type for value in graph.sharded.graph.inputs}
    for name in samples.proposed if samples else ():
        yield Operand(
            name=name,
            role="carried",
            shape=(padded_rows, VECTOR_LANES),
            dtype=types[name].dtype,
            updated=True,
            purpose="of the drafts, from round to round",
        )


def table_operands(graph: StepGraph) -> dict[str, str]:
    """Parameter key -> operand, of the tables that single rows are read of."""
    found: dict[str, str] = {}
    for step in graph.steps():
        operands = step.nodes[0].operands
        if step.kind is StepKind.EMBED:
            found.setdefault(operands[1], f"table_{step.id}")
        elif step.kind is StepKind.SELECTOR_WALK:
            for key, word in zip(operands[3:5], ("predecessor", "successor"), strict=True):
                found.setdefault(key, f"table_{step.id}_{word}")
        elif step.kind is StepKind.MARKOV_WALK:
            found.setdefault(operands[1], f"table_{step.id}_predecessor")
    return found


def _scalar_operands(graph: StepGraph, rounds: int) -> list[Operand]:
    """What the launch is called with in scalar memory."""
    local = graph.sharded.graph
    is_round = bool(graph.scalars)
    step = "round" if is_round else "step"
    found = [
        _scalars("tokens", local.rows, f"token ids of this {step}"),
        _scalars("positions", local.rows, "of each sequence; one with a negative position rests"),
    ]
    if "kept" in graph.scalars:
        found.append(_scalars("kept", local.batch, "rows of the last round that are committed"))
    if is_round or rounds > 1:
        purpose = f"{step}s of each sequence in this launch, at least 1"
        found.append(_scalars("rounds", local.batch, purpose))
    if is_round:
        found.append(_scalars("budgets", local.batch, "tokens each sequence may still emit"))
    if is_round or rounds > 1:
        purpose = f"{STOP_IDS} ids that end each sequence; -1 for none"
        found.append(_scalars("stop_ids", local.batch * STOP_IDS, purpose))
    samples = samples_of(graph)
    if samples is not None:
        types = {value.name: value.type for value in local.inputs}
        for name in samples.options:
            count = prod(types[name].shape)
            found.append(_scalars(name, count, "of each sequence", types[name].dtype))
        purpose = "what a sequence has to emit in the first round, -1 behind it"
        found.append(_scalars(FORCED, local.rows, purpose))
    return found


def _scalars(name: str, count: int, purpose: str, dtype: DType = DType.I32) -> Operand:
    return Operand(
        name=name,
        role=name,
        shape=(count,),
        dtype=dtype,
        updated=False,
        purpose=purpose,
    )
