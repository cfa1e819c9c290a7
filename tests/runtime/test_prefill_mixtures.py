"""Prefill of what mixtures of experts need, against single steps of the reference evaluator.

Two layers of Kimi K3: delta attention with a decay of each channel, latent attention, residual
blocks, experts in bf16 and in MXFP4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from mkc.ir.facets import REFERENCE
from mkc.ir.graph import StateKind
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.reference import Rounding
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.reference_experts import decode
from mkc.ir.reference_ops import OpContext
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.passes.p10_shard import Shard
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.pack_experts import ExpertPacker
from mkc.runtime.prefill import PrefillProgram
from mkc.runtime.prefill_experts import PIECE_ROWS
from mkc.runtime.prefill_experts import decoded
from mkc.runtime.prefill_experts import expert_sum
from mkc.runtime.prefill_latent import attend_latents
from mkc.runtime.prefill_ops import ATTENTION_TILE
from mkc.runtime.prefill_ops import AXIS
from mkc.runtime.tape_index import ExpertUse
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertSlice
from tests.ir.test_reference_goldens import rms
from tests.ir.test_reference_goldens import worst
from tests.kernel.harness import STATE_RELATIVE_RMS
from tests.kernel.harness import build
from tests.kernel.harness import lower
from tests.kernel.test_mixtures import HEADS
from tests.kernel.test_mixtures import subject_of
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_kimi
from tests.runtime.prefilled import empty
from tests.runtime.prefilled import snapshot

type Array = NDArray[Any]

ROWS = 16
PROMPT = 36


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Logits f32 [PROMPT, vocab] of single steps, and states after each."""

    logits: Array
    states: list[dict[str, Array]]


@cache
def single_steps(kind: str, rounding: Rounding = "reference") -> Steps:
    subject = subject_of(kind)
    graph = subject.trace(1)
    step = compile_step(graph, subject.weights, rounding=rounding)
    memory, logits, states = initial_states(graph, rounding), [], []
    for position, token in enumerate(subject.prompt[:PROMPT]):
        result = step([token], [position], memory)
        memory = result.states
        logits.append(np.asarray(result.outputs["logits"][0], np.float32))
        states.append({key: np.asarray(one, np.float32) for key, one in memory.items()})
    return Steps(logits=np.stack(logits), states=states)


def check(kind: str, session: KernelSession, slot: int, count: int, logits: Any) -> None:
    """What a slot remembers after `count` tokens, and logits within twice what roundings do."""
    found, steps = np.asarray(logits, np.float32), single_steps(kind)
    exact = single_steps(kind, "float32").logits
    wanted = steps.logits[count - 1]
    assert worst(found, wanted) < 2 * worst(steps.logits, exact)
    assert rms(found, wanted) < 2 * rms(steps.logits, exact)
    for key, state in session.lowered.steps.sharded.full.states.items():
        mine, expected = (
            session.state(key)[:, slot].astype(np.float32),
            steps.states[count - 1][key][:, 0],
        )
        if state.kind is StateKind.KV_CACHE:
            assert np.isnan(mine[:, count:]).all(), f"{key}: rows were written ahead"
            mine, expected = mine[:, :count], expected[:, :count]
        assert rms(mine, expected) < STATE_RELATIVE_RMS * expected.std(), key


@pytest.mark.parametrize(("kind", "ranks"), [("mxfp4", 4), ("experts", 1)])
def test_prompts_in_pieces(kind: str, ranks: int) -> None:
    """Two of three sequences, of different lengths: full blocks, padded ones, none at all."""
    subject = subject_of(kind)
    session = empty(build(subject, lower(subject, ranks=ranks, batch=3), True))
    program = PrefillProgram(lowered=session.lowered, mesh=session.mesh, rows=ROWS, lanes=2)
    untouched = {key: session.state(key)[:, 1].tobytes() for key in subject.trace(1).states}
    prompt = subject.prompt.tolist()
    places = {2: 0, 0: 0}
    for counts in ((16, 7), (16, 0), (4, 13)):
        blocks = [
            prompt[places[slot] : places[slot] + count]
            for slot, count in zip(places, counts, strict=True)
        ]
        starts = list(places.values())
        result = program(session.operands, blocks, slots=list(places), starts=starts)
        for lane, (slot, count) in enumerate(zip(list(places), counts, strict=True)):
            places[slot] += count
            if count:
                check(kind, session, slot, places[slot], result.logits[lane])
    assert places == {2: 36, 0: 20}
    for key, bits in untouched.items():
        assert session.state(key)[:, 1].tobytes() == bits, key


def test_padding_changes_no_bit() -> None:
    """Whatever tokens padding rows hold; their experts are not even chosen."""
    subject = subject_of("mxfp4")
    session = empty(build(subject, lower(subject, ranks=1, batch=1), True))
    program = PrefillProgram(lowered=session.lowered, mesh=session.mesh, rows=ROWS)
    operands, seen = dict(session.operands), []
    for padding in (0, 400):
        tokens = np.array([*subject.prompt[:5], *[padding] * (ROWS - 5)], np.int32)
        states = tuple(jnp.copy(operands[one.name]) for one in program.states)
        scalars = [np.array([one], np.int32) for one in (0, 0, 5)]
        weights = tuple(operands[one.name] for one in program.weights)
        _, logits, changed = program.compiled(tokens, *scalars, weights, states)
        session.operands.update(zip((one.name for one in program.states), changed, strict=True))
        seen.append((snapshot(session), np.asarray(logits).tobytes()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("mxfp4", "slices"), [(True, 2), (False, 1)])
def test_more_rows_of_an_expert_than_a_piece_has(mxfp4: bool, slices: int) -> None:
    """Two groups; experts with no row, with some, with more than one piece; rows without one."""
    rows, k, groups = 150, 4, 2
    graph = small_kimi(layers=2, latent=[], dense=1, mxfp4=mxfp4)
    sharded = Shard(ranks=groups * slices).apply(graph, DecisionLog())
    node = next(one for one in graph.body.nodes() if isinstance(one.op, ExpertMlp))
    tensors = kimi_weights(graph, 3, heads=HEADS)
    params = [graph.params[key] for key in node.operands[3:]]
    experts, width, inner = params[0].type.shape[0], 64, 128
    plan = ExpertPlan(
        name="experts",
        ring="ring",
        gate_up_array="gate_up",
        down_array="down",
        layers=2,
        local=experts // groups,
        groups=groups,
        slices=slices,
        params=node.operands[3:],
    )
    held = ExpertSlice(
        width=width // slices, inner=inner, dtype=DType.E2M1X2 if mxfp4 else DType.BF16
    )
    packer = ExpertPacker(plan=plan, held=held, sharded=sharded, load=tensors.__getitem__)
    ranks = range(groups * slices)

    def entries(array: str, rank: int) -> Array:
        """Of two layers; the first one has the experts in the other order."""
        own = np.stack([packer.entry(array, one, rank) for one in range(plan.local)])
        return np.concatenate([own[::-1], own])

    gate_up, down = (
        np.concatenate([entries(name, rank) for rank in ranks]) for name in ("gate_up", "down")
    )
    random = np.random.default_rng(5)
    x = jnp.asarray(random.normal(size=(rows, inner)), jnp.bfloat16)
    # Every second row has expert 30 first, so that it has more than one piece.
    ids = np.stack([random.permutation(28)[:k] for _ in range(rows)])
    ids[::2, 0] = 30
    counted = np.arange(rows) < rows - 9
    assert (counted & (ids == 30).any(axis=1)).sum() > PIECE_ROWS
    weights = random.uniform(0.1, 1, size=(rows, k)).astype(np.float32)

    def rank_sum(gate_up: jax.Array, down: jax.Array) -> jax.Array:
        own = expert_sum(
            node.op,
            ExpertUse(plan=plan, held=held),
            x,
            jnp.asarray(ids),
            jnp.asarray(weights),
            jnp.asarray(counted),
            gate_up=gate_up,
            down=down,
            layer=jnp.int32(1),
        )
        return jax.lax.psum(own, AXIS)

    spec = PartitionSpec(AXIS)
    mesh = mesh_of(jax.devices()[: len(ranks)])
    sum_of = jax.shard_map(
        rank_sum, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(), check_vma=False
    )
    found = np.asarray(jax.jit(sum_of)(gate_up, down))
    whole = [np.stack([tensors[name] for name in one.tensor_names()]) for one in params]
    context = OpContext(
        rounding="float32",
        operand_types=tuple(
            TensorType(dtype=dtype, axes=())
            for dtype in (DType.BF16, DType.I32, DType.F32, *(one.type.dtype for one in params))
        ),
        result_types=(TensorType(dtype=DType.F32, axes=()),),
    )
    reference = partial(REFERENCE.find(node.op), node.op)
    ((expected,), _) = reference((x, ids, weights, *map(jnp.asarray, whole)), (), context)
    expected = np.asarray(expected)[counted]
    # The gated value is rounded to bf16.
    assert rms(found[counted], expected) < 0.005 * expected.std()
    assert (found[~counted] == 0).all(), "rows that do not count have no experts"


def test_bytes_of_an_entry_are_the_values_of_the_checkpoint() -> None:
    random = np.random.default_rng(7)
    codes = random.integers(0, 256, size=(24, 32), dtype=np.uint8)  # [outputs, inputs / 2]
    scales = random.integers(100, 140, size=(24, 2), dtype=np.uint8)
    entry = np.concatenate([codes.T, scales.T, np.full((5, 24), 77, np.uint8)]).view(np.int8)
    expected = np.asarray(decode(jnp.asarray(codes), jnp.asarray(scales)))
    even, odd = np.split(np.asarray(decoded(jnp.asarray(entry), 64)), 2)
    assert (even == expected.T[::2]).all()
    assert (odd == expected.T[1::2]).all()


def test_latent_attention_over_several_tiles() -> None:
    """Rows on both sides of a border of tiles, in a context that is no multiple of them."""
    heads, dim, shared, value, rank, rows, length = 3, 16, 8, 16, 32, 5, 700
    first = ATTENTION_TILE - 2
    random = np.random.default_rng(11)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    q, shared_q = draw(rows, heads, dim), draw(rows, heads, shared)
    latent, shared_k = draw(rows, rank), draw(rows, shared)
    up = draw(heads * (dim + value), rank)
    caches = [jnp.full((1, length, 1, one), jnp.nan, jnp.bfloat16) for one in (rank, shared)]
    caches = [one.at[:, :first].set(draw(1, first, 1, one.shape[3])) for one in caches]
    positions = jnp.arange(first, first + rows)
    types = [TensorType(dtype=DType.BF16, axes=())] * 6
    context = OpContext(
        rounding="float32",
        operand_types=tuple(types),
        result_types=(TensorType(dtype=DType.F32, axes=(axis(rows), axis(heads), axis(value))),),
    )
    op = LatentAttention(scale=0.3)
    reference = partial(REFERENCE.find(op), op)
    ((expected,), states) = reference(
        (q, shared_q, latent, shared_k, up, positions), tuple(caches), context
    )
    padded = jnp.pad(states[1], ((0, 0), (0, 0), (0, 0), (0, 120)))
    found = attend_latents(
        q[None],
        shared_q[None],
        up,
        states[0].reshape(1, 1, length, rank),
        padded.reshape(1, 1, length, 128),
        jnp.int32(0),
        jnp.zeros(1, jnp.int32),
        positions[None],
        op.scale,
    )
    # Sums of 515 terms in f32, in another order.
    largest = np.abs(np.asarray(expected)).max()
    assert worst(np.asarray(found)[0], np.asarray(expected)) < 515 * 2**-24 * largest
