"""Registration of operations: the built-in ones, and a user's own from outside the tree.

An op that is registered traces, verifies, prints, parses and evaluates like a built-in one. It
compiles when it also has a sharding and an emission; without them the compiler names what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import is_dataclass
from re import fullmatch
from typing import Any
from typing import get_type_hints

from mkc.errors import RegistrationError
from mkc.ir.facets import COST
from mkc.ir.facets import EMIT
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.facets import SHARD
from mkc.ir.graph import StateKind
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
from mkc.ir.ops import Cast
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Embed
from mkc.ir.ops import L2Norm
from mkc.ir.ops import Linear
from mkc.ir.ops import MaskTokens
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import ShardedArgmax
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary

BUILT_IN: tuple[type[Op], ...] = (
    AllReduce,
    Argmax,
    Attention,
    Binary,
    Cast,
    CausalConv,
    DeltaRule,
    Embed,
    L2Norm,
    Linear,
    MaskTokens,
    MergeHeads,
    RmsNorm,
    Rotary,
    RotaryTable,
    Scale,
    ShardedArgmax,
    Slice,
    SplitHeads,
    SplitParts,
    Unary,
)

# The kinds of the states an op reads and writes, in the op's order; ops without states are absent.
STATE_KINDS: dict[type[Op], tuple[StateKind, ...]] = {
    Attention: (StateKind.KV_CACHE, StateKind.KV_CACHE),
    CausalConv: (StateKind.CONV,),
    DeltaRule: (StateKind.RECURRENT,),
}

# Words of the text form that start a statement; a mnemonic must not be one of them.
RESERVED_WORDS = frozenset(
    {"batch", "context", "input", "metadata", "output", "param", "repeat", "rows", "state", "yield"}
)

MNEMONICS.update({op_type.mnemonic: op_type for op_type in BUILT_IN})


def register_op(
    op_type: type[Op],
    *,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    cost: Callable[..., Any] | None = None,
    shard: Callable[..., Any] | None = None,
    emit: Callable[..., Any] | None = None,
    state_kinds: Sequence[StateKind] = (),
) -> None:
    """Makes `op_type` known to every part of mkc, under its `mnemonic`.

    Args:
      op_type: a frozen dataclass derived from `Op` with a `mnemonic` of its own; its fields are the
        op's attributes: numbers, strings, booleans, enumerations, tuples of these, or None.
      infer: shape inference, `(op, operand types, state types) -> result types`.
      reference: meaning in `jax.numpy`, `(op, operands, states, context) -> (results, new states)`;
        `context` is an `mkc.ir.reference.OpContext`.
      cost: `(op, operand types, state types, result types) -> Cost`; zero cost without it.
      shard, emit: sharding and emission; an op without them is refused when it is compiled.
      state_kinds: kinds of the op's states, in order.

    Raises:
      RegistrationError: the class is not such a dataclass, or the op or mnemonic is already taken.
    """
    _check_class(op_type)
    for name, function in (("infer", infer), ("reference", reference)):
        if not callable(function):
            raise RegistrationError(
                op=op_type.__name__,
                problem=f"'{name}' is {function!r}, not a function",
                hint="Every op needs shape inference and a reference meaning; pass both functions",
            )
    for facet in (INFER, REFERENCE, COST, SHARD, EMIT):
        if op_type in facet.table:
            raise RegistrationError(
                op=op_type.__name__,
                problem=f"it already has a {facet.name}",
                hint="Register each op once; pass all its functions to that call",
            )
    MNEMONICS[op_type.mnemonic] = op_type
    INFER.register(op_type)(infer)
    REFERENCE.register(op_type)(reference)
    for facet, optional in ((COST, cost), (SHARD, shard), (EMIT, emit)):
        if optional is not None:
            facet.register(op_type)(optional)
    if state_kinds:
        STATE_KINDS[op_type] = tuple(state_kinds)


def unregister_op(op_type: type[Op]) -> None:
    """Undoes `register_op`; built-in ops stay."""
    assert op_type not in BUILT_IN, f"{op_type.__name__} is built in"
    assert MNEMONICS.get(op_type.mnemonic) is op_type, f"{op_type.__name__} is not registered"
    del MNEMONICS[op_type.mnemonic]
    for facet in (INFER, REFERENCE, COST, SHARD, EMIT):
        facet.table.pop(op_type, None)
    STATE_KINDS.pop(op_type, None)


def _check_class(op_type: type[Op]) -> None:
    def refuse(problem: str, hint: str) -> RegistrationError:
        return RegistrationError(
            op=getattr(op_type, "__name__", repr(op_type)), problem=problem, hint=hint
        )

    if not (isinstance(op_type, type) and issubclass(op_type, Op)):
        raise refuse("it is not a subclass of mkc.ir.ops.Op", "Derive the class from Op")
    parameters = getattr(op_type, "__dataclass_params__", None)
    # A subclass inherits the attribute, so `__dict__` tells whether it is itself a dataclass.
    own = "__dataclass_params__" in vars(op_type)
    if not (is_dataclass(op_type) and own and parameters is not None and parameters.frozen):
        raise refuse(
            "it is not a frozen dataclass", "Decorate it with @dataclass(frozen=True, kw_only=True)"
        )
    if "mnemonic" not in vars(op_type):
        raise refuse(
            "it has no mnemonic of its own", 'Add `mnemonic: ClassVar[str] = "..."` to the class'
        )
    mnemonic = op_type.mnemonic
    if not fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", mnemonic) or mnemonic in RESERVED_WORDS:
        raise refuse(
            f"mnemonic {mnemonic!r} cannot stand in the text form",
            f"Use letters, digits, '_' and '.', and none of {', '.join(sorted(RESERVED_WORDS))}",
        )
    taken = MNEMONICS.get(mnemonic)
    if taken is not None:
        raise refuse(
            f"mnemonic '{mnemonic}' already belongs to {taken.__module__}.{taken.__qualname__}",
            "Choose another mnemonic, and register each op once",
        )
    try:
        get_type_hints(op_type)
    except NameError as error:
        raise refuse(
            f"the annotations of {', '.join(one.name for one in fields(op_type))} do not resolve "
            f"({error})",
            "Define the op and the types of its attributes at module level",
        ) from error
