"""Router and experts at the sizes of one of 32 ranks of a 2.8T model; see
`tests.codegen_pallas.support_aot`."""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

EXPERTS, CHOICES = 896, 16
WIDTH = 3584  # of what experts read and write
INNER = 3072
LAYERS = 2
SLOTS = 3
ROWS = 8


def expert_cases() -> list[Case]:
    """One row and eight rows; three layouts of the experts over 32 ranks; bf16 matrices."""
    return [
        route_case("route_1", rows=1),
        route_case("route_8", rows=8),
        expert_case("experts_8x4_1", rows=1, groups=8),
        expert_case("experts_8x4_8", rows=8, groups=8),
        expert_case("experts_2x16_1", rows=1, groups=2),
        expert_case("experts_1x32_8", rows=8, groups=1),
        expert_case("experts_bf16", rows=8, groups=1, packed=False),
    ]


def _padded(value: int, multiple: int = 128) -> int:
    return -(-value // multiple) * multiple


def route_case(name: str, *, rows: int) -> Case:
    """16 of 896 for every row, and the list of the experts of a rank."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s
    from mkc.ir.ops_experts import RouterScore

    listed = _padded(rows * CHOICES)

    def body(first: Any, logits: Any, bias: Any, ids: Any, weights: Any, *rest: Any) -> None:
        chosen, places, landing, sem = rest
        s.route(
            s.View(ref=logits, start=0, width=EXPERTS),
            bias[...],
            ids=s.View(ref=ids, start=0, width=CHOICES),
            weights=s.View(ref=weights, start=0, width=CHOICES),
            space=places if rows > 8 else None,
            landing=landing,
            chosen=chosen,
            sem=sem,
            rows=rows,
            k=CHOICES,
            score=RouterScore.SIGMOID,
            renormalise=True,
            factor=1.0,
            first=first[0],
            local=112,
        )

    return Case(
        name=name,
        body=body,
        operands=[
            (array((1,), jnp.int32), pltpu.SMEM),
            (array((ROWS, EXPERTS), jnp.float32), pltpu.VMEM),
            (array((1, EXPERTS), jnp.float32), pltpu.VMEM),
        ],
        results=[
            (array((ROWS, 128), jnp.int32), pltpu.VMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            (array((8, listed), jnp.int32), pltpu.SMEM),
        ],
        scratch=[
            pltpu.VMEM((ROWS, EXPERTS), jnp.float32),
            pltpu.VMEM((8, listed), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
    )


def expert_case(name: str, *, rows: int, groups: int, packed: bool = True) -> Case:
    """Two layers of the experts that are listed in scalar memory."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    width, local = INNER * groups // 32, EXPERTS // groups
    lanes = _padded(2 * width)
    listed = _padded(rows * CHOICES)
    dtype = jnp.int8 if packed else jnp.bfloat16
    shapes = (
        (s.packed_rows(WIDTH), lanes) if packed else (WIDTH, lanes),
        (s.packed_rows(_padded(width, 64)), WIDTH) if packed else (width, WIDTH),
    )

    def body(first: Any, table: Any, x: Any, ids: Any, weights: Any, *rest: Any) -> None:
        gate_up, down, out, gate_up_ring, down_ring, arrived, left = rest
        store = s.ExpertStore(
            gate_up_hbm=gate_up,
            down_hbm=down,
            gate_up_ring=gate_up_ring,
            down_ring=down_ring,
            arrived=arrived,
            chosen=table,
            left=left if packed else None,
            local=local,
            slots=SLOTS,
        )

        def layer(index: Any, carry: Any) -> Any:
            s.experts_start(store, index)
            s.expert_mlp(
                store,
                index,
                x=s.View(ref=x, start=0, width=WIDTH),
                ids=s.View(ref=ids, start=0, width=CHOICES),
                weights=s.View(ref=weights, start=0, width=CHOICES),
                out=s.View(ref=out, start=0, width=WIDTH),
                first=first[0],
                rows=rows,
                width=width,
                gate_cap=4.0,
                up_cap=25.0,
            )
            return carry

        jax.lax.fori_loop(0, LAYERS, layer, jnp.int32(0))

    return Case(
        name=name,
        body=body,
        operands=[
            (array((1,), jnp.int32), pltpu.SMEM),
            (array((8, listed), jnp.int32), pltpu.SMEM),
            (array((ROWS, WIDTH), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.int32), pltpu.VMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            *[(array((LAYERS * local, *shape), dtype), pl.ANY) for shape in shapes],
        ],
        results=[(array((ROWS, WIDTH), jnp.float32), pltpu.VMEM)],
        scratch=[
            *[pltpu.VMEM((SLOTS, *shape), dtype) for shape in shapes],
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.VMEM(s.left_shape(rows, WIDTH), jnp.bfloat16),
        ],
    )
