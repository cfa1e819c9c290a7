"""Backends that run rounds of a target and a drafter, each compiled once per test process.

Drafters of golden models have random weights, so their drafts are hardly ever accepted: tests of
acceptance put drafts of their own into a slot (`draft`), or take the small model that is shipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache
from json import loads
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.ir.types import DType
from mkc.passes.pipeline import Lowered
from mkc.runtime.backends.kernel_rounds import KernelRoundsBackend
from mkc.runtime.backends.speculative import SpeculativeBackend
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from mkc.targets import load_target
from models import dflash2
from models import dspark
from models import kimi_k3
from models import qwen38
from tests.codegen_pallas.support_run import Mode
from tests.draft_goldens import TARGET_CASE
from tests.draft_goldens import draft_case
from tests.draft_goldens import draft_values
from tests.draft_goldens import round_weights
from tests.generate_weights import checkpoint_tensors
from tests.goldens import CONTEXT
from tests.goldens import golden_case
from tests.models.test_dflash2 import changed
from tests.runtime.emulated_rounds import EmulatedRounds

type Array = NDArray[Any]
type RoundsBackend = KernelRoundsBackend | SpeculativeBackend

TARGET = "tpu7x:2x2x1"
ROUNDS = 4
MINI, LANE, TINY, KIMI = TARGET_CASE, "qwen38_lane", "tiny", "kimi_tiny"
# Trained models that bring their drafters.
SHIPPED = {one: Path(__file__).parents[2] / "models" / one for one in (TINY, KIMI)}
DRAFTS = {
    **{one: loads((at / "drafter" / "config.json").read_text()) for one, at in SHIPPED.items()},
    MINI: draft_case().meta["config"],
    LANE: changed(
        hidden_size=512,
        intermediate_size=768,
        vocab_size=2048,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        sliding_window=32,
        num_target_layers=4,
        draft_target_layer_ids=[0, 2],
        draft_mask_token_id=2040,
        draft_selector_rank=128,
    ),
}


@cache
def scheme_of(name: str, *, batch: int, sampling: bool = False) -> Round:
    """Rounds of a golden target and its drafter, or of a small model, with masks."""
    if name in SHIPPED:
        target = loads((SHIPPED[name] / "config.json").read_text())
    else:
        target = golden_case(name).meta["config"]
    return block_round(
        kimi_k3.MODEL if name == KIMI else qwen38.MODEL,
        target,
        dspark.DRAFTER if name == KIMI else dflash2.DRAFTER,
        DRAFTS[name],
        batch=batch,
        context=CONTEXT,
        sampling=sampling,
    ).masked


@cache
def tensors_of(name: str) -> Mapping[str, Array]:
    """Of target and drafter, by their names in the round."""
    if name == MINI:
        return round_weights()
    if name in SHIPPED:
        drafts = load_file(SHIPPED[name] / "drafter" / SINGLE)
        named = {DRAFT_NAMESPACE + key: one for key, one in drafts.items()}
        return load_file(SHIPPED[name] / SINGLE) | named
    found: dict[str, Array] = dict(golden_case(name).weights())
    for full, shape, dtype in checkpoint_tensors(scheme_of(name, batch=1).graph):
        if full.startswith(DRAFT_NAMESPACE):
            assert dtype is DType.BF16, f"{full} is {dtype}"
            own = full.removeprefix(DRAFT_NAMESPACE)
            found[full] = draft_values(own, shape, 2).astype(np.float32).astype(bfloat16)
    return found


@cache
def lowered_round(name: str, *, ranks: int, batch: int, sampling: bool = False) -> Lowered:
    graph = scheme_of(name, batch=batch, sampling=sampling).graph
    target = load_target(TARGET)
    return lower_graph(graph, target, tp=ranks, logits=True, rounds_per_launch=ROUNDS)


@cache
def emulated(name: str, *, ranks: int, batch: int) -> KernelRoundsBackend:
    """All of a kernel's backend but the kernel."""
    session = emulated_session(name, ranks=ranks, batch=batch)
    return KernelRoundsBackend(session, scheme_of(name, batch=batch))


def emulated_session(name: str, *, ranks: int, batch: int) -> EmulatedRounds:
    return EmulatedRounds(
        lowered=lowered_round(name, ranks=ranks, batch=batch),
        source="",
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=True,
        scheme=scheme_of(name, batch=batch),
        tensors=tensors_of(name),
    )


@cache
def interpreted(
    name: str, *, ranks: int, batch: int, sampling: bool = False
) -> KernelRoundsBackend:
    """The kernel itself, in the interpreter; it takes minutes to compile."""
    lowered = lowered_round(name, ranks=ranks, batch=batch, sampling=sampling)
    mode = Mode.GENERIC if ranks == 1 else Mode.EAGER
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=load_target(TARGET)),
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=mode.parameters(),
    )
    session.load_weights(tensors_of(name).__getitem__)
    return KernelRoundsBackend(session, scheme_of(name, batch=batch, sampling=sampling))


@cache
def reference(name: str, *, batch: int, sampling: bool = False) -> SpeculativeBackend:
    """The same rounds, evaluated by XLA."""
    scheme = scheme_of(name, batch=batch, sampling=sampling)
    return SpeculativeBackend(scheme, tensors_of(name).__getitem__, rounds_per_launch=ROUNDS)


def draft(backend: RoundsBackend, slot: int, tokens: Sequence[int], position: int) -> None:
    """Puts a token at a position and drafts behind it into a slot, as its next round's rows."""
    rows = {
        name: backend._carried.values[name].reshape(backend.batch, -1)
        for name in ("tokens", "positions")
    }
    rows["tokens"][slot, : len(tokens)] = tokens
    rows["positions"][slot] = -1
    rows["positions"][slot, : len(tokens)] = position + np.arange(len(tokens))
