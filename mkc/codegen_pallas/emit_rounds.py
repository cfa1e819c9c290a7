"""EMIT facets of the vector operations that only speculative rounds have; see `emit`."""

from __future__ import annotations

from mkc.codegen_pallas.emit import FUNCTIONS
from mkc.codegen_pallas.emit import EmitContext
from mkc.codegen_pallas.emit import Emitted
from mkc.codegen_pallas.emit import Operands
from mkc.ir import ops_spec
from mkc.ir.facets import EMIT


@EMIT.register(ops_spec.KeptConv)
def kept_conv(
    op: ops_spec.KeptConv, operands: Operands, context: EmitContext
) -> tuple[Emitted, ...]:
    """Commits what was accepted, and replaces the kept inputs."""
    (history, history_cursor), (rows, rows_cursor) = context.states
    x, _, kept = operands
    code = (
        f"support.kept_conv({history}, {history_cursor}, {rows}, {rows_cursor}, {x.code}, "
        f"({', '.join(context.taps)}), kept={kept.code}, positions={context.positions}, "
        f"batch=BATCH, rows_per_sequence=ROWS_PER_SEQUENCE, "
        f"activation={FUNCTIONS.get(op.activation, 'None')})"
    )
    return (Emitted(code=code),)


@EMIT.register(ops_spec.DynamicConv)
def dynamic_conv(
    op: ops_spec.DynamicConv, operands: Operands, context: EmitContext
) -> tuple[Emitted, ...]:
    """Of one side; the base vectors are those of its taps."""
    x, kernels, _ = operands
    code = (
        f"support.dynamic_conv({x.code}, {kernels.code}, ({', '.join(context.taps)},), "
        f"side={op.side}, group={op.group}, rows_per_sequence={op.rows})"
    )
    return (Emitted(code=code),)
