"""EMIT facets of operations on heads and residual blocks; see `mkc.codegen_pallas.emit`."""

from __future__ import annotations

from mkc.codegen_pallas.emit import EmitContext
from mkc.codegen_pallas.emit import Emitted
from mkc.codegen_pallas.emit import Operands
from mkc.ir.facets import EMIT
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.passes.mixing_parts import MixStored
from mkc.passes.mixing_parts import MixStream
from mkc.passes.rank_ops import JoinParts
from mkc.passes.rank_ops import ShardedScaleHeads


@EMIT.register(MixBlocks)
def mix_blocks(op: MixBlocks, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Blocks and their number are read where they lie: they are too large for registers."""
    blocks = operands[0]
    arguments = ", ".join(one.code for one in operands)
    slots = blocks.type.shape[1]
    sizes = f"slots={slots}, period={op.period}, eps={op.eps!r}"
    return (Emitted(code=f"support.mix_blocks({arguments}, {sizes})"),)


@EMIT.register(MixStored)
def mix_stored(op: MixStored, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """One call with two results; blocks as in `mix_blocks`."""
    slots = operands[0].type.shape[1]
    arguments = ", ".join(one.code for one in operands)
    sizes = f"slots={slots}, period={op.period}, eps={op.eps!r}"
    return (Emitted(code=f"support.mix_stored({arguments}, {sizes})"),)


@EMIT.register(MixStream)
def mix_stream(op: MixStream, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """What is stored comes from a buffer, in registers."""
    arguments = ", ".join(one.code for one in operands)
    return (Emitted(code=f"support.mix_stream({arguments}, eps={op.eps!r})"),)


@EMIT.register(ScaleHeads)
def scale_heads(op: ScaleHeads, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """All factors are of this rank's heads."""
    return _scaled(operands, "0")


@EMIT.register(JoinParts)
def join_parts(op: JoinParts, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Whole registers side by side."""
    parts = ", ".join(one.code for one in operands)
    return (Emitted(code=f"support.join([{parts}])", exact=True),)


@EMIT.register(ShardedScaleHeads)
def sharded_scale_heads(
    op: ShardedScaleHeads, operands: Operands, context: EmitContext
) -> tuple[Emitted, ...]:
    """Of all factors those of this rank's heads."""
    rank = 'lax.axis_index("tp")'
    shard = rank if op.copies == 1 else f"{rank} // {op.copies}"
    return _scaled(operands, f"{shard} * {operands[0].heads}")


def _scaled(operands: Operands, first: str) -> tuple[Emitted, ...]:
    x, factor = operands
    code = f"support.scale_heads({x.code}, {factor.code}, heads={x.heads}, first={first})"
    return (Emitted(code=code),)
