"""Kernels of graphs that are built otherwise than the shipped model: the example of a dense
decoder, and a graph without any state that uses an op registered here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

import mkc
from mkc.codegen_pallas.emit import EmitContext
from mkc.codegen_pallas.emit import Emitted
from mkc.codegen_pallas.emit import Operand
from mkc.ir.graph import StateKind
from mkc.ir.ops import Op
from mkc.ir.reference import OpContext
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from mkc.ir.types import TensorType
from mkc.passes.shard_rules import like_first
from models.examples import dense
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import PROMPT
from tests.kernel.harness import STEPS
from tests.kernel.harness import Subject
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of

CONTEXT = 128
VOCAB, HIDDEN, WIDE = 512, 256, 512


def random_weights(graph: mkc.Graph) -> dict[str, NDArray[Any]]:
    """Norms near one, matrices that keep the size of their input."""
    random = np.random.default_rng(7)
    found = {}
    for param in graph.params.values():
        for name in param.tensor_names():
            noise = random.standard_normal(param.type.shape)
            vector = noise.ndim == 1
            value = 1 + 0.1 * noise if vector else noise / np.sqrt(noise.shape[-1])
            found[name] = value.astype(np.float32)
    return found


def subject_of(decoder: Any, name: str, vocab: int) -> Subject:
    def trace(batch: int) -> mkc.Graph:
        return mkc.trace(decoder, name=name, batch=batch, context=CONTEXT)

    prompt = np.random.default_rng(8).integers(0, vocab, PROMPT).astype(np.int32)
    return Subject(name=name, trace=trace, weights=random_weights(trace(1)), prompt=prompt)


@pytest.fixture(scope="module")
def dense_subject() -> Subject:
    return subject_of(dense.decoder, "dense", dense.VOCAB)


def test_dense_decoder_on_one_device(dense_subject: Subject) -> None:
    """A whole text, through several tiles of its caches."""
    reference = reference_of(dense_subject)
    session = session_of(
        dense_subject,
        ranks=1,
        batch=2,
        mode=Mode.GENERIC,
        passes="residency{cache_tile=32}",
    )
    kinds = {one.kind for one in session.lowered.steps.sharded.full.states.values()}
    assert kinds == {StateKind.KV_CACHE}
    check(run_kernel(session, reference, [0, 0], STEPS), reference)


def test_dense_decoder_on_two_devices(dense_subject: Subject) -> None:
    reference = reference_of(dense_subject)
    session = session_of(
        dense_subject, ranks=2, batch=3, mode=Mode.LATE, passes="residency{cache_tile=16}"
    )
    check(run_kernel(session, reference, (15, 0, 48), 2), reference)


@dataclass(frozen=True, kw_only=True)
class Clamp(Op):
    """x -> min(max(x, low), high), like x. The bounds are bf16 numbers."""

    mnemonic: ClassVar[str] = "test.clamp"
    low: float
    high: float


def infer_clamp(
    op: Clamp, operands: tuple[TensorType, ...], states: tuple[TensorType, ...]
) -> tuple[TensorType, ...]:
    return (operands[0],)


def reference_clamp(
    op: Clamp, operands: tuple[Array, ...], states: tuple[Array, ...], context: OpContext
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return (context.result(jnp.clip(operands[0], op.low, op.high)),), ()


def emit_clamp(
    op: Clamp, operands: tuple[Operand, ...], context: EmitContext
) -> tuple[Emitted, ...]:
    return (Emitted(code=f"jnp.clip({operands[0].code}, {op.low!r}, {op.high!r})", exact=True),)


@pytest.fixture
def clamp() -> Iterator[None]:
    register_op(
        Clamp,
        infer=infer_clamp,
        reference=reference_clamp,
        shard=like_first,
        emit=emit_clamp,
    )
    yield
    unregister_op(Clamp)


def clamped_decoder(step: mkc.Step) -> mkc.Outputs:
    """Three residual layers whose inner activation is clamped; no attention, no state."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(3):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        up = mkc.linear(x, layer.param("up.weight", [WIDE, HIDDEN]))
        (bounded,) = mkc.apply(Clamp(low=-0.5, high=0.25), up)
        h = h + mkc.linear(bounded, layer.param("down.weight", [HIDDEN, WIDE]))
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("lm_head.weight", [VOCAB, HIDDEN]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_op_from_outside_the_tree(clamp: None, ranks: int) -> None:
    """Its own emission stands in the source, and its meaning is that of its reference facet."""
    subject = subject_of(clamped_decoder, "clamped", VOCAB)
    reference = reference_of(subject)
    session = session_of(subject, ranks=ranks, batch=2, mode=Mode.LATE)
    assert "jnp.clip(" in session.source
    check(run_kernel(session, reference, (0, 16), 2), reference)
