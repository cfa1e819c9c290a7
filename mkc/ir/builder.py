"""Tracing: runs a model's Python function once and records its ops.

`trace` calls the function with a `Step`; the functions of `mkc.ir.functional` record ops on
`Tensor`s; `mkc.ir.layers` marks where the iterations of a layer stack begin and end. Every
iteration is recorded, so a layer may do whatever it likes; equal layers are folded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter
from inspect import signature
from typing import Any

from mkc.errors import BatchError
from mkc.errors import ContextError
from mkc.errors import ParamNameError
from mkc.errors import ShapeError
from mkc.errors import TraceError
from mkc.ir.assemble import Assembler
from mkc.ir.assemble import Item
from mkc.ir.fold import fold_loop
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Value
from mkc.ir.infer import infer
from mkc.ir.location import Places
from mkc.ir.location import author_location
from mkc.ir.location import definition
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import Op
from mkc.ir.trace import TracedLoop
from mkc.ir.trace import TracedNode
from mkc.ir.trace import TracedParam
from mkc.ir.trace import TracedState
from mkc.ir.types import Axis
from mkc.ir.types import AxisLike
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.ir.types import tensor

_ADD = Binary(function=BinaryKind.ADD)
_SUB = Binary(function=BinaryKind.SUB)
_MUL = Binary(function=BinaryKind.MUL)


class Tensor:
    """A value or a parameter of the graph under construction.

    `+`, `-` and `*` are element-wise; the right operand may be a vector along the last axis.
    """

    __slots__ = ("ref", "trace", "type")

    def __init__(self, *, trace: Trace, ref: int | TracedParam, type_: TensorType) -> None:
        self.trace = trace
        self.ref = ref
        self.type = type_

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __add__(self, other: Tensor) -> Tensor:
        return self.trace.add(_ADD, (self, other))[0]

    def __sub__(self, other: Tensor) -> Tensor:
        return self.trace.add(_SUB, (self, other))[0]

    def __mul__(self, other: Tensor) -> Tensor:
        return self.trace.add(_MUL, (self, other))[0]

    def __bool__(self) -> bool:
        raise TraceError(
            where="a condition",
            location=author_location(),
            problem="the value of a tensor is not known while the graph is built",
            expected="a condition on the config or on layer.index",
            hint="Decide with Python numbers; the graph itself has no branches",
        )

    def __repr__(self) -> str:
        return f"Tensor({self.type})"


@dataclass(frozen=True, kw_only=True)
class StateRef:
    """A state of a layer, to hand to the op that reads and writes it."""

    trace: Trace
    use: TracedState

    @property
    def type(self) -> TensorType:
        return self.use.type


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """The two states of one attention layer."""

    key: StateRef
    value: StateRef


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one decode step gets.

    Attributes:
      rows: token rows; one per sequence for plain decoding, else consecutive tokens of a sequence
        side by side.
      batch: independent sequences.
      context: positions a cache holds.
      tokens: token ids, i32 [rows].
      positions: position of each row in its sequence, i32 [rows].
    """

    rows: int
    batch: int
    context: int
    tokens: Tensor
    positions: Tensor

    def limit_context(self, positions: int) -> None:
        """Says how many positions the model was made for. Raises `ContextError` beyond it."""
        if self.context > positions:
            raise ContextError(
                context=self.context,
                expected=f"at most the {positions} positions that the model was made for",
                hint=f"Use --context {positions} or less",
            )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a step returns: next token i32 [rows] and its logits [rows, vocab]."""

    next_token: Tensor
    logits: Tensor


class Trace:
    """What has been recorded so far.

    Attributes:
      taps: whether `mkc.tap` records anything.
      namespace: stands before the names of parameters and states.
    """

    def __init__(
        self, *, name: str, rows: int, batch: int, context: int, taps: bool = False
    ) -> None:
        self.taps = taps
        self.namespace = ""
        self.name = name
        self.rows = rows
        self.batch = batch
        self.context = context
        self.items: list[TracedNode | TracedLoop] = []
        self.loop: TracedLoop | None = None
        self.types: list[TensorType] = []  # by value number
        self._declared: dict[str, tuple[object, ...]] = {}
        self._places = Places()
        # One object per distinct op and type: comparing and hashing them again is then cheap.
        self._inferred: dict[tuple[object, ...], tuple[Op, tuple[TensorType, ...]]] = {}
        self._interned: dict[tuple[object, ...], TensorType] = {}
        row_axis = axis(rows, "rows")
        self.inputs = {
            input_name: self.new_value(self.intern(TensorType(dtype=DType.I32, axes=(row_axis,))))
            for input_name in ("tokens", "positions")
        }

    def new_input(self, name: str, dtype: DType, *sizes: int) -> Tensor:
        """An input besides tokens and positions."""
        self.inputs[name] = self.new_value(self.intern(tensor(dtype, *sizes)))
        return self.inputs[name]

    def new_value(self, type_: TensorType) -> Tensor:
        self.types.append(type_)
        return Tensor(trace=self, ref=len(self.types) - 1, type_=type_)

    def intern(self, type_: TensorType) -> TensorType:
        # Equality of types leaves out which units may be copied; that must not get lost here.
        copyable = tuple(part.copyable for one in type_.axes for part in one.parts)
        return self._interned.setdefault((type_, copyable), type_)

    def add(
        self, op: Op, operands: Sequence[Tensor], states: Sequence[StateRef] = ()
    ) -> tuple[Tensor, ...]:
        """Records one op and returns its results."""
        location = self._places.author()
        for operand in operands:
            self._check_operand(op, operand, location)
        # Types are interned, so their identity stands for their value.
        form = (op, *(id(one.type) for one in operands), *(id(one.type) for one in states))
        known = self._inferred.get(form)
        if known is None:
            operand_types = tuple(one.type for one in operands)
            found = infer(op, operand_types, tuple(one.type for one in states), location)
            known = self._inferred[form] = (op, tuple(self.intern(one) for one in found))
        op, types = known
        results = tuple(self.new_value(type_) for type_ in types)
        node = TracedNode(
            op=op,
            operands=tuple(one.ref for one in operands),
            states=tuple(one.use for one in states),
            results=tuple(range(len(self.types) - len(types), len(self.types))),
            types=types,
            location=location,
        )
        if self.loop is None:
            self.items.append(node)
        else:
            self.loop.segments[-1].append(node)
        return results

    def _check_operand(self, op: Op, operand: object, location: Location | None) -> None:
        if not isinstance(operand, Tensor):
            raise TraceError(
                where=op.mnemonic,
                location=location,
                problem=f"an operand is {operand!r}",
                expected="a tensor of this step",
                hint="Use mkc.scale for a constant factor; other constants belong in parameters",
            )
        if operand.trace is not self:
            raise TraceError(
                where=op.mnemonic,
                location=location,
                problem="an operand belongs to another graph",
                expected="tensors made while this function runs",
                hint="Make parameters and values inside the traced function",
            )

    def declare(self, pattern: str, form: tuple[object, ...]) -> None:
        """Checks that a name always means the same thing."""
        known = self._declared.setdefault(pattern, form)
        if known != form:
            raise ParamNameError(
                name=pattern,
                location=author_location(),
                problem=f"declared as {_form_text(form)}, but earlier as {_form_text(known)}",
                hint="Give both declarations the same axes and dtype, or different names",
            )

    def begin_loop(self, name: str) -> TracedLoop:
        if self.loop is not None:
            raise TraceError(
                where="mkc.layers",
                location=author_location(),
                problem="a loop over layers inside another one",
                expected="one loop over layers at a time",
                hint="Use an ordinary Python loop inside; equal layers in a row fold by themselves",
            )
        self.loop = TracedLoop(name=name, location=author_location())
        self.items.append(self.loop)
        return self.loop


def _form_text(form: tuple[object, ...]) -> str:
    return " ".join(str(part) for part in form)


_CURRENT: ContextVar[Trace | None] = ContextVar("mkc_trace", default=None)


def current_trace(where: str) -> Trace:
    """The trace that is being recorded."""
    found = _CURRENT.get()
    if found is None:
        raise TraceError(
            where=where,
            location=author_location(),
            problem="no graph is being built",
            expected="a call from a function that mkc.trace runs",
            hint="Move the call into the function",
        )
    return found


def apply(op: Op, *operands: Tensor, states: Sequence[StateRef] = ()) -> tuple[Tensor, ...]:
    """Records any op, also one registered from outside mkc."""
    return current_trace(op.mnemonic).add(op, operands, states)


def param(pattern: str, axes: Sequence[AxisLike], dtype: DType | str = DType.BF16) -> Tensor:
    """A weight of the model under its checkpoint name, axes as stored.

    Naming it twice gives the same parameter, for tied weights.
    """
    return declare_param(current_trace("mkc.param"), pattern, axes, dtype, ())


def declare_param(
    trace_: Trace,
    pattern: str,
    axes: Sequence[AxisLike],
    dtype: DType | str,
    indices: tuple[int, ...],
) -> Tensor:
    pattern = trace_.namespace + pattern
    type_ = trace_.intern(tensor(known_dtype(pattern, dtype), *checked_axes(pattern, axes)))
    trace_.declare(pattern, ("parameter", type_))
    use = TracedParam(pattern=pattern, type=type_, indices=indices)
    return Tensor(trace=trace_, ref=use, type_=type_)


def known_dtype(name: str, dtype: DType | str) -> DType:
    try:
        return DType(dtype)
    except ValueError:
        raise ParamNameError(
            name=name,
            location=author_location(),
            problem=f"its dtype is {dtype!r}",
            hint=f"Use one of {', '.join(sorted(DType))}",
        ) from None


def checked_axes(name: str, axes: Sequence[AxisLike]) -> Sequence[AxisLike]:
    for one in axes:
        size = one.size if isinstance(one, Axis) else one
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ShapeError(
                op=f"'{name}'",
                location=author_location(),
                expected="axes that are positive integers or mkc.heads(...)",
                got=f"{one!r}",
                hint="Correct the axes",
            )
    return axes


def trace(
    function: Callable[..., Outputs],
    *,
    name: str,
    batch: int,
    context: int,
    config: Any = None,
    rows_per_sequence: int = 1,
) -> Graph:
    """Builds the graph of one step: a decode step, or a block of consecutive tokens.

    Args:
      function: `function(step)`, or `function(config, step)` when a config is given; returns
        `Outputs`.
      name: name of the model.
      batch: independent sequences.
      context: positions a cache holds.
      rows_per_sequence: token rows of each sequence; row s * rows_per_sequence + t is token t of
        sequence s.

    Raises:
      MkcError: the function builds no valid graph; the message has the author's place.
    """
    if batch < 1:
        raise BatchError(batch=batch)
    assert rows_per_sequence >= 1, f"{rows_per_sequence} rows per sequence"
    if context < 1:
        raise ContextError(
            context=context, expected="at least one position", hint="Choose a positive --context"
        )
    rows = batch * rows_per_sequence
    record = Trace(name=name, rows=rows, batch=batch, context=context)
    step = Step(
        rows=rows,
        batch=batch,
        context=context,
        tokens=record.inputs["tokens"],
        positions=record.inputs["positions"],
    )
    arguments = (step,) if config is None else (config, step)
    _check_callable(function, name, len(arguments))
    with recording(record):
        outputs = function(*arguments)
    if not isinstance(outputs, Outputs):
        raise TraceError(
            where=record.name,
            location=definition(function),
            problem=f"the function returned {type(outputs).__name__}",
            expected="mkc.Outputs",
            hint="End the function with return mkc.next_token(hidden, lm_head)",
        )
    return build(record, {"next_token": outputs.next_token, "logits": outputs.logits})


@contextmanager
def recording(record: Trace) -> Iterator[None]:
    """What is called inside is recorded in `record`."""
    token = _CURRENT.set(record)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _check_callable(function: Callable[..., Outputs], name: str, count: int) -> None:
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        one
        for one in signature(function).parameters.values()
        if one.kind in positional and one.default is Parameter.empty
    ]
    if len(required) != count:
        raise TraceError(
            where=name,
            location=definition(function),
            problem=f"the function takes {len(required)} arguments",
            expected="function(step)" if count == 1 else "function(config, step)",
            hint="Change its parameters",
        )


def build(record: Trace, results: Mapping[str, Tensor]) -> Graph:
    """The graph of what was recorded; `results` are its outputs by name."""
    read_later = {one.ref for one in results.values() if isinstance(one.ref, int)}
    items: list[Item] = []
    renamed: dict[int, int] = {}
    for item in reversed(record.items):
        if isinstance(item, TracedNode):
            read_later.update(item.reads())
            items.append(item)
            continue
        folding = fold_loop(item, read_later=read_later, types=record.types)
        renamed.update(folding.renamed)
        items.extend(reversed(folding.items))
        read_later.update(
            value for segment in item.segments for node in segment for value in node.reads()
        )
    items.reverse()
    inputs = {one.ref: key for key, one in record.inputs.items() if isinstance(one.ref, int)}
    built = Assembler(items, values=inputs, renamed=renamed)
    return Graph(
        name=record.name,
        rows=record.rows,
        batch=record.batch,
        context=record.context,
        inputs=tuple(Value(name=key, type=one.type) for key, one in record.inputs.items()),
        params=built.params,
        states=built.states,
        body=built.body,
        outputs={
            key: built.value(one.ref) for key, one in results.items() if isinstance(one.ref, int)
        },
    )
