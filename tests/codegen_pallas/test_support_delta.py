"""The delta rule against plain numpy: outputs, states in HBM, head mapping, batch, rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.support_run import BATCHES
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

LAYERS = 3


def reference_step(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: float, decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """One head in f64: the new state `[dk, dv]` and the output `[dv]`."""
    state = np.exp(decay) * state
    predicted = state.T @ k
    state = state + np.outer(k, beta * (v - predicted))
    return state, state.T @ q


@pytest.mark.parametrize(("mode", "batch"), BATCHES)
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"),
    [
        pytest.param(2, 6, 128, 128, id="unrolled"),
        pytest.param(2, 4, 32, 16, id="narrow"),
        pytest.param(7, 14, 32, 64, id="head loop"),
    ],
)
def test_delta_rule(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, batch: int, mode: Mode
) -> None:
    random = np.random.default_rng(batch)
    keys, values = key_heads * key_dim, value_heads * value_dim
    items, slots = LAYERS * batch, min(2, LAYERS * batch)
    states = random.normal(size=(items, value_heads * key_dim, value_dim)).astype(np.float32)
    mix = random.normal(size=(8, 16 + 2 * keys + values)).astype(np.float32) / key_dim**0.5
    gates = np.zeros((8, 128), np.float32)
    gates[:, 8 : 8 + value_heads] = random.uniform(size=(8, value_heads))
    gates[:, 32 : 32 + value_heads] = -random.uniform(size=(8, value_heads))

    positions = np.arange(batch, dtype=np.int32)
    positions[1::3] = -1  # rest

    def body(positions: Any, mix: Any, gates: Any, _: Any, hbm: Any, *rest: Any) -> None:
        out, ring, arrived, written = rest
        stream = s.Stream(
            hbm=hbm, ring=ring, arrived=arrived, written=written, items=items, slots=slots
        )
        out[...] = jnp.zeros_like(out)

        def layer(index: jax.Array, cursor: s.StreamCursor) -> s.StreamCursor:
            layer_out = out.at[index]
            return s.delta_rule(
                stream,
                cursor,
                positions,
                q=s.View(ref=mix, start=16, width=keys),
                k=s.View(ref=mix, start=16 + keys, width=keys),
                v=s.View(ref=mix, start=16 + 2 * keys, width=values),
                beta=s.View(ref=gates, start=8, width=value_heads),
                decay=s.View(ref=gates, start=32, width=value_heads),
                out=s.View(ref=layer_out, start=0, width=values),
                batch=batch,
                key_heads=key_heads,
                value_heads=value_heads,
                key_dim=key_dim,
                value_dim=value_dim,
            )

        lax.fori_loop(0, LAYERS, layer, s.stream_prologue(stream))
        s.stream_drain(stream)

    new_states, out = run(
        body,
        operands=[(positions, SMEM), (mix, VMEM), (gates, VMEM), (states, HBM)],
        results=[(states.shape, jnp.float32, HBM), ((LAYERS, 8, values), jnp.float32, VMEM)],
        scratch=[
            VMEM((slots, *states.shape[1:]), jnp.float32),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((slots,)),
        ],
        aliases={3: 0},
        mode=mode,
    )
    q, k, v = np.split(mix[:, 16:].astype(np.float64), [keys, 2 * keys], axis=1)
    for layer in range(LAYERS):
        for sequence in range(batch):
            if positions[sequence] < 0:
                item = layer * batch + sequence
                np.testing.assert_array_equal(new_states[item], states[item])
                np.testing.assert_array_equal(out[layer, sequence], 0)
                continue
            for head in range(value_heads):
                key_head = head * key_heads // value_heads
                of_key = slice(key_head * key_dim, (key_head + 1) * key_dim)
                of_value = slice(head * value_dim, (head + 1) * value_dim)
                of_state = slice(head * key_dim, (head + 1) * key_dim)
                item = layer * batch + sequence
                state, result = reference_step(
                    states[item, of_state],
                    q[sequence, of_key],
                    k[sequence, of_key],
                    v[sequence, of_value],
                    gates[sequence, 8 + head],
                    gates[sequence, 32 + head],
                )
                np.testing.assert_allclose(new_states[item, of_state], state, rtol=1e-4, atol=1e-5)
                got = out[layer, sequence, of_value]
                np.testing.assert_allclose(got, result, rtol=2**-7, atol=1e-4)
                np.testing.assert_array_equal(got, got.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(out[:, batch:], 0)
