"""Operations of mixtures of experts: the choice of experts, and their MLPs.

As in `mkc.ir.ops`, a class says operands, states and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from mkc.ir.ops import Op

NORM_EPS = 1e-20  # added to the sum that the weights of the chosen experts are divided by


class RouterScore(StrEnum):
    """How logits become scores: each by itself, or all of a row together."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, kw_only=True)
class Route(Op):
    """logits [rows, experts] and, for families that have it, bias f32 [experts]
    -> ids i32 [rows, k], weights f32 [rows, k].

    The k experts with the largest score + bias in descending order, the lowest number first on
    ties. Their weights are the scores, without the bias; divided by their sum + NORM_EPS where
    `renormalise`; times `scale`. All in f32.
    """

    mnemonic: ClassVar[str] = "route"
    k: int
    score: RouterScore
    renormalise: bool
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertMlp(Op):
    """x [rows, n], ids i32 [rows, k], weights f32 [rows, k], gate, up [experts, w, n], down
    [experts, n, w] -> like x: the weighted sum of the chosen experts' gated MLPs.

    y_e = down_e (cap(gate_e x, gate_cap) sigmoid(gate_e x) cap(up_e x, up_cap)), where cap(z, c) is
    c tanh(z / c), or z without c: SwiGLU without caps. Both products, the gated value and y_e are
    rounded to x's dtype; sum_e weight_e y_e in f32 in ascending order of experts, rounded once.

    Each of the three matrices may be in MXFP4 (see `mkc.ir.mxfp4`): then a matrix [experts, N, K]
    is two operands, codes e2m1x2 [experts, N, K / 2] and scales e8m0 [experts, N, K / 32].
    """

    mnemonic: ClassVar[str] = "expert_mlp"
    gate_cap: float | None = None
    up_cap: float | None = None


EXPERT_OPS: tuple[type[Op], ...] = (ExpertMlp, Route)
