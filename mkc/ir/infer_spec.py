"""Shape inference of the operations of speculative rounds; registers them in the text form."""

from __future__ import annotations

from collections.abc import Mapping

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.infer import Types
from mkc.ir.infer import infer
from mkc.ir.infer import no_states
from mkc.ir.infer import require
from mkc.ir.infer import require_positions
from mkc.ir.infer import require_rank
from mkc.ir.infer import require_rows
from mkc.ir.infer import take
from mkc.ir.ops import Attention
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Op
from mkc.ir.ops_spec import SPEC_OPS
from mkc.ir.ops_spec import SPEC_STATE_KINDS
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import BlockTokens
from mkc.ir.ops_spec import CacheAppend
from mkc.ir.ops_spec import DynamicConv
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import KeptPositions
from mkc.ir.ops_spec import NextPositions
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK
from mkc.ir.register import STATE_KINDS
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

MNEMONICS.update({op_type.mnemonic: op_type for op_type in SPEC_OPS})
STATE_KINDS.update(SPEC_STATE_KINDS)


def _per_sequence(
    op: Op,
    name: str,
    type_: TensorType,
    rows: int,
    dtype: DType = DType.I32,
    *,
    width: int = 0,
    batch: int | None = None,
) -> int:
    """Checks a value with one entry per sequence, of `batch` if known; how many there are."""
    form = f"[batch, {width}]" if width else "[batch]"
    fits = (
        type_.rank == 1 + bool(width) and type_.dtype is dtype and type_.shape[1:] in ((), (width,))
    )
    require(fits, op, f"{name} {dtype}{form}", type_, f"Pass one {name} per sequence")
    found = type_.shape[0]
    require(
        rows % found == 0 if batch is None else found == batch,
        op,
        f"{name} of a batch that divides the {rows} rows"
        if batch is None
        else f"{name} of {batch} sequences",
        found,
        "Use values of the same step",
    )
    return found


def _rows_i32(op: Op, name: str, type_: TensorType, rows: int) -> None:
    require(
        type_.dtype is DType.I32 and type_.shape == (rows,),
        op,
        f"{name} i32[{rows}]",
        type_,
        "Pass one number per row",
    )


@INFER.register(Tap)
def _tap(op: Tap, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    (shown,) = take(op, states, 1, "the state that shows it")
    require(
        x.rank == 2 and shown.shape == x.shape[1:] and shown.dtype is x.dtype,
        op,
        f"a state {x.dtype}[{x.shape[-1]}]",
        shown,
        "Declare it with the axes of one row of x",
    )
    return ()


@INFER.register(ReadTaps)
def _read_taps(op: ReadTaps, operands: Types, states: Types) -> Types:
    (positions,) = take(op, operands, 1, "positions")
    require_positions(op, positions)
    for one in states:
        require(
            one.shape == (op.width,) and one.dtype is op.dtype,
            op,
            f"states {op.dtype}[{op.width}]",
            one,
            "Read taps of one kind",
        )
    found = (len(op.numbers), len(op.instances))
    require(
        found in ((0, 0), (len(op.layers),) * 2) and all(n < len(states) for n in op.numbers),
        op,
        f"a state and an instance for each of the layers {op.layers}",
        f"{op.numbers}, {op.instances}",
        "Connect the taps with mkc.spec.taps.connect",
    )
    width = axis(op.width * len(op.layers))
    return (TensorType(dtype=op.dtype, axes=(positions.axes[0], width)),)


@INFER.register(KeptConv)
def _kept_conv(op: KeptConv, operands: Types, states: Types) -> Types:
    x, weight, kept = take(op, operands, 3, "x, weight, kept")
    history, rows = take(op, states, 2, "the convolution state, kept rows")
    results = infer(CausalConv(taps=op.taps), (x, weight), (history,))
    batch = _per_sequence(op, "kept", kept, x.shape[0])
    wanted = (x.shape[0] // batch, x.shape[1])
    _require_kept(op, rows, wanted, x.dtype)
    return results


@INFER.register(KeptDeltaRule)
def _kept_delta_rule(op: KeptDeltaRule, operands: Types, states: Types) -> Types:
    q, k, v, beta, decay, kept = take(op, operands, 6, "q, k, v, beta, decay, kept")
    memory, keys, updates, decays = take(op, states, 4, "state, kept k, kept u, kept decay")
    results = infer(DeltaRule(dtype=op.dtype), (q, k, v, beta, decay), (memory,))
    rows = v.shape[0] // _per_sequence(op, "kept", kept, v.shape[0])
    _require_kept(op, keys, (rows, *k.shape[1:]), DType.F32)
    _require_kept(op, updates, (rows, *v.shape[1:]), DType.F32)
    _require_kept(op, decays, (rows, *decay.shape[1:]), DType.F32)
    return results


def _require_kept(op: Op, state: TensorType, shape: tuple[int, ...], dtype: DType) -> None:
    require(
        state.shape == shape and state.dtype is dtype,
        op,
        f"kept rows {dtype}{list(shape)}",
        state,
        "Declare them with the rows of one sequence",
    )


@INFER.register(KeptPositions)
@INFER.register(NextPositions)
def _positions(op: Op, operands: Types, states: Types) -> Types:
    positions, count = take(op, operands, 2, "positions, count")
    no_states(op, states)
    require_positions(op, positions)
    _per_sequence(op, "count", count, positions.shape[0])
    return (positions,)


@INFER.register(BlockTokens)
def _block_tokens(op: BlockTokens, operands: Types, states: Types) -> Types:
    anchor, positions = take(op, operands, 2, "anchor, positions")
    no_states(op, states)
    require_positions(op, positions)
    _per_sequence(op, "anchor", anchor, positions.shape[0])
    return (positions,)


@INFER.register(DynamicConv)
def _dynamic_conv(op: DynamicConv, operands: Types, states: Types) -> Types:
    x, kernels, base = take(op, operands, 3, "x, kernels, base")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, channels]")
    require_rank(op, "base", base, 3, "[sides, taps, channels]")
    require_rows(op, x, "kernels", kernels)
    sides, taps, channels = base.shape
    require(
        channels == x.shape[1] and op.group > 0 and channels % op.group == 0,
        op,
        f"base kernels of {x.shape[1]} channels in groups of {op.group}",
        base,
        "Declare them with the channels of x, a multiple of the group size",
    )
    require(
        kernels.shape[1:] == (sides * taps * (channels // op.group),),
        op,
        f"kernels [rows, {sides} x {taps} x {channels // op.group}]",
        kernels,
        "Project to one number per side, tap and group",
    )
    require(0 <= op.side < sides, op, f"a side below {sides}", op.side, "Correct side")
    _sequences(op, op.rows, x.shape[0])
    return (x,)


@INFER.register(CacheAppend)
def _cache_append(op: CacheAppend, operands: Types, states: Types) -> Types:
    k, v, positions = take(op, operands, 3, "k, v, positions")
    infer(Attention(scale=1.0), (k, k, v, positions), states)
    return ()


@INFER.register(BlockAttention)
def _block_attention(op: BlockAttention, operands: Types, states: Types) -> Types:
    q, k, v, positions, *context = take(
        op, operands, 7, "q, k, v, positions, context k, context v, context positions"
    )
    results = infer(Attention(scale=op.scale), (q, k, v, positions), states)
    infer(Attention(scale=op.scale), (q, *context), states)
    require(
        op.window is None or op.window > 0,
        op,
        "a window of at least 1, or none",
        op.window,
        "Correct the window",
    )
    return results


@INFER.register(TopK)
def _top_k(op: TopK, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, n]")
    require(0 < op.k <= x.shape[1], op, f"k from 1 to {x.shape[1]}", op.k, "Ask for fewer elements")
    axes = (x.axes[0], axis(op.k))
    return (TensorType(dtype=DType.F32, axes=axes), TensorType(dtype=DType.I32, axes=axes))


@INFER.register(SelectorWalk)
def _selector_walk(op: SelectorWalk, operands: Types, states: Types) -> Types:
    what = "values, ids, hidden, predecessor, successor, tokens, positions"
    _require_count(op, operands, {7: what, 9: "also temperature, seed"})
    no_states(op, states)
    values, ids, hidden, predecessor, successor, tokens, positions, *sampling = operands
    rows = values.shape[0]
    batch = _sequences(op, op.rows, rows)
    _require_candidates(op, ids, values, rows)
    require_rows(op, values, "hidden", hidden)
    for name, codebook in (("predecessor", predecessor), ("successor", successor)):
        require(
            codebook.rank == 2 and codebook.shape[1] == hidden.shape[-1],
            op,
            f"a {name} codebook [vocab, {hidden.shape[-1]}]",
            codebook,
            "Give codebooks and projection one rank",
        )
    _rows_i32(op, "tokens", tokens, rows)
    require_positions(op, positions)
    if sampling:
        _per_sequence(op, "temperature", sampling[0], rows, DType.F32, batch=batch)
        _per_sequence(op, "seed", sampling[1], rows, width=2, batch=batch)
    return (tokens, values)


def _require_candidates(op: Op, ids: TensorType, values: TensorType, rows: int) -> None:
    require(
        ids.rank == 2
        and ids.shape == values.shape
        and ids.shape[0] == rows
        and (ids.dtype, values.dtype) == (DType.I32, DType.F32),
        op,
        f"candidates i32[{rows}, K] and numbers f32[{rows}, K] for them",
        f"{ids}, {values}",
        "Take both from one mkc.top_k",
    )


@INFER.register(Accept)
def _accept(op: Accept, operands: Types, states: Types) -> Types:
    forms = {
        3: "logits, tokens, positions",
        8: "also temperature, top_k, top_p, min_p, seed",
        10: "also candidates, proposal",
    }
    _require_count(op, operands, forms)
    no_states(op, states)
    logits, tokens, positions, *sampling = operands
    rows = logits.shape[0]
    batch = _sequences(op, op.rows, rows)
    require_rank(op, "logits", logits, 2, "[rows, vocab]")
    _rows_i32(op, "tokens", tokens, rows)
    _rows_i32(op, "positions", positions, rows)
    if sampling:
        temperature, top_k, top_p, min_p, seed = sampling[:5]
        for name, one in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
            _per_sequence(op, name, one, rows, DType.F32, batch=batch)
        _per_sequence(op, "top_k", top_k, rows, batch=batch)
        _per_sequence(op, "seed", seed, rows, width=2, batch=batch)
    if sampling[5:]:
        _require_candidates(op, sampling[5], sampling[6], rows)
    numbers = TensorType(dtype=DType.I32, axes=(axis(batch),))
    return (tokens, numbers, numbers)


def _require_count(op: Op, operands: Types, forms: Mapping[int, str]) -> None:
    """An op of several forms, by number of operands; each adds to the one before."""
    require(
        len(operands) in forms,
        op,
        ", or ".join(f"{count} of: {what}" for count, what in forms.items()),
        len(operands),
        f"Pass exactly {', or '.join(forms.values())}",
    )


def _sequences(op: Op, rows: int, total: int) -> int:
    """How many sequences of `rows` rows there are."""
    require(
        rows > 0 and total % rows == 0,
        op,
        f"rows of a sequence that divide {total}",
        rows,
        "Pass the rows of one sequence",
    )
    return total // rows
