"""Shape inference of `mkc.ir.ops_experts`; registers its operations in the text form."""

from __future__ import annotations

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.infer import Types
from mkc.ir.infer import no_states
from mkc.ir.infer import require
from mkc.ir.infer import require_rank
from mkc.ir.infer import require_rows
from mkc.ir.mxfp4 import CODES_PER_BYTE
from mkc.ir.mxfp4 import GROUP
from mkc.ir.ops import Op
from mkc.ir.ops_experts import EXPERT_OPS
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

MNEMONICS.update({op_type.mnemonic: op_type for op_type in EXPERT_OPS})


@INFER.register(Route)
def _route(op: Route, operands: Types, states: Types) -> Types:
    require(
        len(operands) in (1, 2),
        op,
        "1 of: logits, or 2: also bias",
        len(operands),
        "Pass the logits, and the bias where the family has one",
    )
    no_states(op, states)
    logits = operands[0]
    require_rank(op, "logits", logits, 2, "[rows, experts]")
    experts = logits.shape[1]
    require(0 < op.k <= experts, op, f"k from 1 to {experts}", op.k, "Choose fewer experts")
    for bias in operands[1:]:
        require(
            bias.shape == (experts,) and bias.dtype is DType.F32,
            op,
            f"a bias f32[{experts}]",
            bias,
            "Declare one number for each expert",
        )
    axes = (logits.axes[0], axis(op.k))
    return (TensorType(dtype=DType.I32, axes=axes), TensorType(dtype=DType.F32, axes=axes))


@INFER.register(ExpertMlp)
def _expert_mlp(op: ExpertMlp, operands: Types, states: Types) -> Types:
    no_states(op, states)
    x, ids, weights, *matrices = operands
    require_rank(op, "x", x, 2, "[rows, n]")
    require_rows(op, x, "ids", ids)
    require(
        ids.rank == 2
        and ids.shape == weights.shape
        and (ids.dtype, weights.dtype) == (DType.I32, DType.F32),
        op,
        f"ids i32[{x.shape[0]}, k] and weights f32 like them",
        f"{ids}, {weights}",
        "Take both from one mkc.route",
    )
    gate, up, down = expert_matrices(op, tuple(matrices))
    experts, width, inner = gate
    for name, shape, wanted in (
        ("gate", gate, (experts, width, x.shape[1])),
        ("up", up, (experts, width, inner)),
        ("down", down, (experts, inner, width)),
    ):
        require(
            shape == wanted,
            op,
            f"{name} {list(wanted)}, as [experts, out, in]",
            list(shape),
            "Give the three matrices of the experts matching sizes",
        )
    return (x,)


def expert_matrices(op: Op, operands: Types) -> tuple[tuple[int, ...], ...]:
    """Shapes [experts, N, K] of gate, up and down, each one operand or codes and scales."""
    shapes: list[tuple[int, ...]] = []
    rest = list(operands)
    while rest:
        one = rest.pop(0)
        require_rank(op, "a matrix of experts", one, 3, "[experts, out, in]")
        shape = one.shape
        if one.dtype is DType.E2M1X2:
            shape = (*shape[:2], shape[2] * CODES_PER_BYTE)
            scales = rest.pop(0) if rest else None
            require(
                scales is not None
                and scales.dtype is DType.E8M0
                and scales.shape == (*shape[:2], shape[2] // GROUP)
                and shape[2] % GROUP == 0,
                op,
                f"scales e8m0[{shape[0]}, {shape[1]}, {shape[2] // GROUP}] behind codes {one}",
                scales,
                f"Pass the scales of each matrix behind its codes; a group has {GROUP} columns",
            )
        shapes.append(shape)
    require(
        len(shapes) == 3,
        op,
        "three matrices: gate, up, down, each of them codes and scales where it is in MXFP4",
        len(shapes),
        "Pass exactly gate, up and down",
    )
    return tuple(shapes)
