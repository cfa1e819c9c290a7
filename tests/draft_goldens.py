"""The golden drafter: its expected tensors, its weights, and rounds with its target."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from json import loads
from math import sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from mkc.spec import plain_round
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL
from tests.generate_weights import bell
from tests.generate_weights import checkpoint_tensors
from tests.generate_weights import values
from tests.goldens import CONTEXT
from tests.goldens import FOLDER
from tests.goldens import Golden
from tests.goldens import golden_case

DRAFT_CASE = "dflash2_mini"
TARGET_CASE = "qwen38_mini"
CODEBOOK_STD = 0.62
BASE_KERNEL_STD = (0.1, 0.25)  # of tap 0, which is around 1, and of tap 1
KERNEL_GAIN = 0.15


@cache
def draft_case() -> Golden:
    """The drafter's case; its `graph` and `weights` are not used."""
    folder = FOLDER / DRAFT_CASE
    return Golden(
        name=DRAFT_CASE,
        meta=loads((folder / "meta.json").read_text()),
        expected=load_file(folder / "expected.safetensors"),
    )


def golden_round(
    *, batch: int = 1, context: int = CONTEXT, sampling: bool = True, **changes: Any
) -> Round:
    """Rounds of the golden target and drafter; `changes` are of the drafter's config."""
    target, draft = golden_case(TARGET_CASE).meta["config"], draft_case().meta["config"]
    return block_round(
        MODEL, target, DRAFTER, draft | changes, batch=batch, context=context, sampling=sampling
    )


def golden_plain(*, batch: int = 1, context: int = CONTEXT) -> Round:
    """Rounds of the golden target alone."""
    return plain_round(MODEL, golden_case(TARGET_CASE).meta["config"], batch=batch, context=context)


@cache
def round_weights() -> Mapping[str, NDArray[Any]]:
    """Tensors of target and drafter by their names in a round's graph."""
    drafts = {DRAFT_NAMESPACE + name: one for name, one in draft_weights().items()}
    return {**golden_case(TARGET_CASE).weights(), **drafts}


@cache
def draft_weights() -> dict[str, NDArray[Any]]:
    """The drafter's tensors by checkpoint name."""
    seed = draft_case().meta["seed"]
    found = {}
    for name, shape, _ in checkpoint_tensors(golden_round().graph):
        if name.startswith(DRAFT_NAMESPACE):
            own = name.removeprefix(DRAFT_NAMESPACE)
            found[own] = draft_values(own, shape, seed).astype(np.float32).astype(bfloat16)
    return found


def draft_values(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
    """Unrounded numbers of one tensor; see `tests.generate_weights` for those of the target."""
    if name.endswith("base_kernel"):
        numbers: NDArray[np.float64] = (
            bell(name, seed, shape) * np.array(BASE_KERNEL_STD)[None, :, None]
        )
        numbers[:, 0] += 1.0
        return numbers
    if name.endswith("codebook"):
        return CODEBOOK_STD * bell(name, seed, shape)
    if name.endswith("norm.weight"):
        return 1.0 + 0.15 * bell(name, seed, shape)
    if name.endswith("kernel_projection.weight"):
        return KERNEL_GAIN / sqrt(shape[-1]) * bell(name, seed, shape)
    return values(name, shape, seed)
