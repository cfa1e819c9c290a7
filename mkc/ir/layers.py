"""Layer stacks: an ordinary `for` loop over layers, which make their parameters and states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass

from mkc.errors import ParamNameError
from mkc.errors import TraceError
from mkc.ir.builder import KvCache
from mkc.ir.builder import StateRef
from mkc.ir.builder import Tensor
from mkc.ir.builder import Trace
from mkc.ir.builder import checked_axes
from mkc.ir.builder import current_trace
from mkc.ir.builder import declare_param
from mkc.ir.builder import known_dtype
from mkc.ir.graph import StateKind
from mkc.ir.location import author_location
from mkc.ir.trace import Segment
from mkc.ir.trace import TracedState
from mkc.ir.types import Axis
from mkc.ir.types import AxisLike
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import tensor


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a stack: makes its parameters and states.

    Attributes:
      index: layer number, from 0.
      prefix: common start of the names, with `{index}`.
    """

    index: int
    prefix: str
    trace: Trace

    def param(
        self, suffix: str, axes: Sequence[AxisLike], dtype: DType | str = DType.BF16
    ) -> Tensor:
        """A weight of this layer; its checkpoint name is the prefix and `suffix`."""
        return declare_param(self.trace, self.prefix + suffix, axes, dtype, (self.index,))

    def state(
        self,
        name: str,
        kind: StateKind | str,
        axes: Sequence[AxisLike],
        dtype: DType | str = DType.BF16,
    ) -> StateRef:
        """Memory of this layer; axes for ONE sequence."""
        pattern = self.trace.namespace + self.prefix + name
        type_ = self.trace.intern(tensor(known_dtype(pattern, dtype), *checked_axes(pattern, axes)))
        kind = StateKind(kind)
        self.trace.declare(pattern, ("state", kind, type_))
        use = TracedState(pattern=pattern, kind=kind, type=type_, indices=(self.index,))
        return StateRef(trace=self.trace, use=use)

    def kv_cache(self, name: str, kv_heads: int, head_dim: int) -> KvCache:
        """Key and value cache, each bf16 [context, kv_heads, head_dim]."""
        axes = (
            self.trace.context,
            Axis(parts=(Part(count=kv_heads, copyable=True),), name="heads"),
            head_dim,
        )
        return KvCache(
            key=self.state(f"{name}.key", StateKind.KV_CACHE, axes),
            value=self.state(f"{name}.value", StateKind.KV_CACHE, axes),
        )


def layers(count: int, prefix: str = "model.layers.{index}.") -> Iterator[Layer]:
    """Layers 0 .. count - 1, for an ordinary `for` loop whose body is run for each of them.

    `{index}` in the prefix becomes the layer number. Layers that do the same things, also in a
    longer pattern, become one repeat region.
    """
    trace_ = current_trace("mkc.layers")
    if not isinstance(count, int) or count < 0:
        raise TraceError(
            where="mkc.layers",
            location=author_location(),
            problem=f"the number of layers is {count!r}",
            expected="an integer that is not negative",
            hint="Pass the number of layers of the checkpoint",
        )
    if "{index}" not in prefix:
        raise ParamNameError(
            name=prefix,
            location=author_location(),
            problem="the prefix of a layer stack has no {index}",
            hint="Write {index} where the checkpoint names have the layer number",
        )
    return _iterate(trace_, count, prefix)


def _iterate(trace_: Trace, count: int, prefix: str) -> Iterator[Layer]:
    words = prefix.split("{index}")[0].strip(".").split(".")
    loop = trace_.begin_loop(words[-1] or "layers")
    try:
        for index in range(count):
            segment: Segment = []
            loop.segments.append(segment)
            yield Layer(index=index, prefix=prefix, trace=trace_)
    finally:
        trace_.loop = None
