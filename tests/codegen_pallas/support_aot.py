"""Compiles the support functions at full size for a real TPU topology, without a TPU.

`python -m tests.codegen_pallas.support_aot TOPOLOGY FAMILY` prints one JSON line per kernel: its
name, instruction bundles and error, if any. A process of its own, because libtpu reads its options
once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types
from tests.codegen_pallas.support_aot_exchanges import argmax_case
from tests.codegen_pallas.support_aot_exchanges import one_shot_case
from tests.codegen_pallas.support_aot_exchanges import two_phase_case
from tests.codegen_pallas.support_aot_experts import expert_cases
from tests.codegen_pallas.support_aot_markov import markov_case
from tests.codegen_pallas.support_aot_mixing import mixing_cases
from tests.codegen_pallas.support_aot_rounds import round_cases
from tests.codegen_pallas.support_aot_sampling import sampling_cases

BATCH = 8
ROWS = 8
HIDDEN = 5120
VOCABULARY = 31232 * 8
LAYERS = 4
DELTA_SIZES = {"key_heads": 2, "value_heads": 6, "key_dim": 128, "value_dim": 128}
WIDE_DELTA_SIZES = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128}
ATTENTION_SIZES = {"heads": 3, "kv_heads": 1, "head_dim": 256}
GROUPED_SIZES = {"heads": 24, "kv_heads": 4, "head_dim": 256}
CONTEXT = 4096
TILE = 256
VMEM_LIMIT_BYTES = 58 << 20


def cases(ranks: int) -> list[Case]:
    """Every support function at the sizes of a 27B model on eight ranks."""
    return [
        tape_case(),
        delta_case("delta_six_heads", DELTA_SIZES, slots=16),
        delta_case("delta_many_heads", WIDE_DELTA_SIZES, slots=4),
        attention_case("attention_one_group", ATTENTION_SIZES),
        attention_case("attention_four_groups", GROUPED_SIZES),
        one_shot_case(ranks, rows=1),
        one_shot_case(ranks, rows=8),
        two_phase_case(ranks),
        argmax_case(ranks),
        embed_case(),
        vector_case(),
        pages_case(),
        activation_case(),
        *round_cases(ranks),
        *sampling_cases(ranks),
    ]


def mixture_cases(ranks: int) -> list[Case]:
    """Every support function that only mixtures of experts, their attention and drafters have."""
    return [*mixing_cases(), *expert_cases(), markov_case(ranks)]


FAMILIES = {"dense": cases, "mixtures": mixture_cases}


def tape_case() -> Case:
    """Three matmuls [8, 5120] x [5120, 256] per step, 12 slots, the last load of another size."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    steps, slots, rows, short = 20, 12, HIDDEN, 2048

    def body(x: Any, hbm: Any, out: Any, ring: Any, sems: Any) -> None:
        tape = s.Tape(hbm=hbm, ring=ring, sems=sems, slots=slots)
        cursor = s.tape_prologue(tape, [rows] * slots)

        def step(index: Any, cursor: Any) -> Any:
            s.tape_wait(tape, cursor, rows)
            out[...] += jnp.dot(x[...], ring[cursor.slot], preferred_element_type=jnp.float32)
            left = steps - slots - index
            return s.tape_refill_cases(tape, cursor, [(left > 0, rows), (left == 0, short)], None)

        out[...] = jnp.zeros_like(out)
        cursor = jax.lax.fori_loop(0, steps, step, cursor)
        s.tape_wait(tape, cursor, short)
        part = ring[cursor.slot, 0:short, :]
        out[...] += jnp.dot(x[:, 0:short], part, preferred_element_type=jnp.float32)

    return Case(
        name="tape",
        body=body,
        operands=[
            (array((ROWS, HIDDEN), jnp.bfloat16), pltpu.VMEM),
            (array((steps * rows + short, 256), jnp.bfloat16), pl.ANY),
        ],
        results=[(array((ROWS, 256), jnp.float32), pltpu.VMEM)],
        scratch=[
            pltpu.VMEM((slots, rows, 256), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((slots,)),
        ],
    )


def delta_case(name: str, sizes: dict[str, int], *, slots: int) -> Case:
    """Two layers of the delta rule with states updated in place."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    keys = sizes["key_heads"] * sizes["key_dim"]
    values = sizes["value_heads"] * sizes["value_dim"]
    items = LAYERS * BATCH
    state = (sizes["value_heads"] * sizes["key_dim"], sizes["value_dim"])

    def body(positions: Any, mix: Any, gates: Any, _: Any, hbm: Any, *rest: Any) -> None:
        out, ring, arrived, written = rest
        stream = s.Stream(
            hbm=hbm, ring=ring, arrived=arrived, written=written, items=items, slots=slots
        )
        out[...] = jnp.zeros_like(out)

        def layer(_: Any, cursor: Any) -> Any:
            return s.delta_rule(
                stream,
                cursor,
                positions,
                q=s.View(ref=mix, start=0, width=keys),
                k=s.View(ref=mix, start=keys, width=keys),
                v=s.View(ref=mix, start=2 * keys, width=values),
                beta=s.View(ref=gates, start=0, width=sizes["value_heads"]),
                decay=s.View(ref=gates, start=128, width=sizes["value_heads"]),
                out=s.View(ref=out, start=0, width=values),
                batch=BATCH,
                **sizes,
            )

        jax.lax.fori_loop(0, LAYERS, layer, s.stream_prologue(stream))
        s.stream_drain(stream)

    states = array((items, *state), jnp.float32)
    return Case(
        name=name,
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 2 * keys + values), jnp.float32), pltpu.VMEM),
            (array((ROWS, 256), jnp.float32), pltpu.VMEM),
            (states, pl.ANY),
        ],
        results=[(states, pl.ANY), (array((ROWS, values), jnp.float32), pltpu.VMEM)],
        scratch=[
            pltpu.VMEM((slots, *state), jnp.float32),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((slots,)),
        ],
        aliases={3: 0},
    )


def attention_case(name: str, sizes: dict[str, int]) -> Case:
    """All layers of cached attention with four tiles in flight."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots = 4
    width = sizes["kv_heads"] * sizes["head_dim"]
    queries = sizes["heads"] * sizes["head_dim"]

    def body(positions: Any, mix: Any, _k: Any, _v: Any, *rest: Any) -> None:
        key_hbm, value_hbm, out, key_ring, value_ring, arrived, *rest = rest
        key_new, value_new, written, awake = rest
        kv = s.KvStream(
            key_hbm=key_hbm,
            value_hbm=value_hbm,
            key_ring=key_ring,
            value_ring=value_ring,
            arrived=arrived,
            key_new=key_new,
            value_new=value_new,
            written=written,
            awake=awake,
            layers=LAYERS,
            slots=slots,
            tile=TILE,
        )
        out[...] = jnp.zeros_like(out)

        def layer(_: Any, cursor: Any) -> Any:
            return s.attention(
                kv,
                cursor,
                positions,
                q=s.View(ref=mix, start=0, width=queries),
                k=s.View(ref=mix, start=queries, width=width),
                v=s.View(ref=mix, start=queries + width, width=width),
                out=s.View(ref=out, start=0, width=queries),
                scale=sizes["head_dim"] ** -0.5,
                **sizes,
            )

        jax.lax.fori_loop(0, LAYERS, layer, s.kv_prologue(kv, positions, BATCH))
        s.kv_drain(kv, positions, BATCH)

    cache = array((LAYERS, BATCH, CONTEXT, width), jnp.bfloat16)
    ring = pltpu.VMEM((slots, TILE, width), jnp.bfloat16)
    new = pltpu.VMEM((BATCH, 16, width), jnp.bfloat16)
    return Case(
        name=name,
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((ROWS, queries + 2 * width), jnp.float32), pltpu.VMEM),
            (cache, pl.ANY),
            (cache, pl.ANY),
        ],
        results=[
            (cache, pl.ANY),
            (cache, pl.ANY),
            (array((ROWS, queries), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            ring,
            ring,
            pltpu.SemaphoreType.DMA((2, slots)),
            new,
            new,
            pltpu.SemaphoreType.DMA((2, BATCH)),
            pltpu.SMEM((BATCH,), jnp.int32),
        ],
        aliases={2: 0, 3: 1},
    )


def embed_case() -> Case:
    """Eight rows of a [249856, 5120] table."""
    _, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(tokens: Any, table: Any, out: Any, blocks: Any, sem: Any) -> None:
        s.embed(table=table, tokens=tokens, blocks=blocks, sem=sem, out=out, batch=BATCH)

    return Case(
        name="embed",
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((VOCABULARY, HIDDEN), jnp.bfloat16), pl.ANY),
        ],
        results=[(array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM)],
        scratch=[pltpu.VMEM((BATCH, 16, HIDDEN), jnp.bfloat16), pltpu.SemaphoreType.DMA],
    )


def vector_case() -> Case:
    """Rotary of 3 heads x 256 (64 rotated), a norm per head, l2 norms of 4 heads x 128."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(positions: Any, frequency: Any, weight: Any, x: Any, y: Any, out: Any) -> None:
        column = s.positions_column(positions, BATCH, ROWS)
        cos, sin = s.rotary_table(column, frequency[...])
        value = s.rms_norm(
            x[...], weight[...], eps=1e-6, zero_centred=True, round_inner=False, heads=3
        )
        value = s.rotary(
            s.round_bf16(value), s.round_bf16(cos), s.round_bf16(sin), heads=3, round=True
        )
        out[:, 0:768] = value
        out[:, 768:1280] = s.l2_norm(y[...], eps=1e-6, heads=4)
        out[:, 1280:1472] = s.slice_heads(value, 3, 64, 64)

    return Case(
        name="vectors",
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((1, 32), jnp.float32), pltpu.VMEM),
            (array((1, 256), jnp.float32), pltpu.VMEM),
            (array((ROWS, 768), jnp.float32), pltpu.VMEM),
            (array((ROWS, 512), jnp.float32), pltpu.VMEM),
        ],
        results=[(array((ROWS, 1472), jnp.float32), pltpu.VMEM)],
        scratch=[],
    )


def pages_case() -> Case:
    """A norm over 5120 lanes with its weight from a streamed page of vectors."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    page = (48, 128)  # 40 rows of norm weights and a short vector

    def body(x: Any, hbm: Any, out: Any, ring: Any, arrived: Any) -> None:
        stream = s.Stream(hbm=hbm, ring=ring, arrived=arrived, written=None, items=LAYERS, slots=2)
        out[...] = x[...]

        def layer(_: Any, cursor: Any) -> Any:
            s.stream_wait(stream, cursor)
            weight = s.vector(ring, cursor.slot, 0, HIDDEN)
            value = s.rms_norm(out[...], weight, eps=1e-6, zero_centred=True, round_inner=False)
            out[...] = s.round_bf16(value)
            out[:, 0:6] += s.vector(ring, cursor.slot, 40, 6)
            return s.stream_advance(stream, cursor)

        jax.lax.fori_loop(0, LAYERS, layer, s.stream_prologue(stream))

    return Case(
        name="pages",
        body=body,
        operands=[
            (array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM),
            (array((LAYERS, *page), jnp.float32), pl.ANY),
        ],
        results=[(array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM)],
        scratch=[pltpu.VMEM((2, *page), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
    )


def activation_case() -> Case:
    """Every activation once on [8, 1024]."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    functions = (s.silu, s.sigmoid, s.softplus, s.exp, s.tanh, s.gelu_tanh, s.negate)

    def body(x: Any, out: Any) -> None:
        for index, function in enumerate(functions):
            out[index] = function(x[...])

    return Case(
        name="activations",
        body=body,
        operands=[(array((ROWS, 1024), jnp.float32), pltpu.VMEM)],
        results=[(array((len(functions), ROWS, 1024), jnp.float32), pltpu.VMEM)],
        scratch=[],
    )


def compile_case(case: Case, mesh: Any) -> None:
    """Lowers and compiles one kernel for the mesh; raises what the compiler raises."""
    jax, _, array, pl, pltpu = types()
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec

    def launch(*operands: Any) -> Any:
        return pl.pallas_call(
            case.body,
            out_shape=[shape for shape, _ in case.results],
            in_specs=[pl.BlockSpec(memory_space=space) for _, space in case.operands],
            out_specs=[pl.BlockSpec(memory_space=space) for _, space in case.results],
            scratch_shapes=case.scratch,
            input_output_aliases=case.aliases,
            compiler_params=pltpu.CompilerParams(
                collective_id=0 if case.barrier else None, vmem_limit_bytes=VMEM_LIMIT_BYTES
            ),
            name=case.name,
        )(*operands)

    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        launch, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    sharding = NamedSharding(mesh, everywhere)
    operands = [array(shape.shape, shape.dtype, sharding=sharding) for shape, _ in case.operands]
    jax.jit(sharded, donate_argnums=tuple(case.aliases)).lower(*operands).compile()


def main(topology: str, family: str = "dense", wanted: str = "") -> None:
    """Compiles every kernel of a family whose name contains `wanted`, and prints the outcome."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no TPU is used, so none is locked
        keep = os.environ.get("SUPPORT_AOT_DUMP", dump)
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={keep} --xla_jf_dump_llo_text=true"
        import numpy
        from jax.experimental import topologies
        from jax.sharding import Mesh

        from mkc.codegen_pallas.aot import count_bundles

        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(numpy.array(devices), ("tp",))
        for case in FAMILIES[family](len(devices)):
            if wanted not in case.name:
                continue
            result: dict[str, Any] = {"name": case.name, "bundles": 0, "error": None}
            try:
                compile_case(case, mesh)
                result["bundles"] = count_bundles(Path(keep), case.name)
            except Exception as error:  # the test shows it
                result["error"] = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
