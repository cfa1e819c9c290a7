"""The arrays a kernel is called with."""

from __future__ import annotations

from mkc.ir.types import DType
from mkc.passes.p30_tile import Tiles
from mkc.passes.p50_residency import Residency
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.schedule.program import STOP_IDS
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Operand
from mkc.schedule.program import mask_lanes


def kernel_operands(
    graph: StepGraph, tiles: Tiles, residency: Residency, rounds: int, padded_rows: int
) -> tuple[Operand, ...]:
    """In the order of the call: inputs, weights, then what the kernel updates."""
    local = graph.sharded.graph
    found = [
        _scalars("tokens", local.batch, "token ids of this step"),
        _scalars("positions", local.batch, "of each sequence; one with a negative position rests"),
    ]
    if rounds > 1:
        found += [
            _scalars("rounds", local.batch, "steps of each sequence in this launch, at least 1"),
            _scalars(
                "stop_ids",
                local.batch * STOP_IDS,
                f"{STOP_IDS} ids that end each sequence; -1 for none",
            ),
        ]
    for step in graph.steps():
        if step.kind is StepKind.ARGMAX and len(step.nodes) > 1:
            columns = graph.resolve(step.nodes[-1].operands[0]).width
            found.append(
                Operand(
                    name=step.nodes[0].operands[1],
                    role="token_masks",
                    shape=(padded_rows, mask_lanes(columns)),
                    dtype=DType.I32,
                    updated=False,
                    purpose="which tokens each sequence may emit, a bit for each column",
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
    for step in graph.steps():
        if step.kind is StepKind.EMBED:
            param = local.params[step.nodes[0].operands[1]]
            rows, columns = param.type.shape
            found.append(
                Operand(
                    name=f"table_{step.id}",
                    role="table",
                    shape=(-(-rows // 16) * 16, columns),
                    dtype=DType.BF16,
                    updated=False,
                    purpose=param.key,
                )
            )
    streams = residency.streams
    for stream in streams.streams:
        if not stream.writes_back:
            role = "page" if stream.name in streams.pages else "narrow"
            found.append(
                Operand(
                    name=stream.array,
                    role=role,
                    shape=(stream.items, *stream.item_shape),
                    dtype=stream.dtype,
                    updated=False,
                    purpose=stream.purpose,
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
        shape = (cache.layers, cache.batch, cache.context, cache.width)
        for array, what in ((cache.key_array, "keys"), (cache.value_array, "values")):
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
    return tuple(found)


def _scalars(name: str, count: int, purpose: str) -> Operand:
    return Operand(
        name=name,
        role=name,
        shape=(count,),
        dtype=DType.I32,
        updated=False,
        purpose=purpose,
    )
