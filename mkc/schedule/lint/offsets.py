"""Places that a traced kernel chooses at run time, as the compiler sees them before it runs.

The compiler must know that a row of a packed array (several elements in a word of 32 bits) begins
where a memory tile does. It knows multiples from the arithmetic that makes an offset and from
`multiple_of`, so that is followed here: for each scalar the largest number that surely divides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from math import gcd
from math import lcm
from math import prod
from typing import Any

TILE_ROWS = 8  # rows of every memory tile divide by this many
WORD_BYTES = 4
ANYTHING = 1  # the divisor of what is not known
COMMON = frozenset({"add", "sub", "max", "min", "select_n", "rem", "neg"})


@dataclass(kw_only=True)
class Offsets:
    """Follows the scalars of a traced kernel.

    Attributes:
      rows: accesses of packed arrays whose row need not begin a tile, as texts.
      views: copies to or from a reshaped or reinterpreted array, as texts.
    """

    rows: dict[str, None] = field(default_factory=dict)
    views: dict[str, None] = field(default_factory=dict)

    def run(self, jaxpr: Any, arguments: Sequence[int]) -> list[int]:
        """Follows a body whose arguments have these divisors; returns those of its results."""
        known = dict.fromkeys(jaxpr.constvars, ANYTHING)
        known.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            inputs = [divisor(known, one) for one in equation.invars]
            self.look(equation, known)
            results = self.results(equation, inputs)
            known.update(zip(equation.outvars, results, strict=True))
        return [divisor(known, one) for one in jaxpr.outvars]

    def results(self, equation: Any, inputs: list[int]) -> Sequence[int]:
        name, params = equation.primitive.name, equation.params
        unknown = [ANYTHING] * len(equation.outvars)
        match name:
            case "convert_element_type" | "squeeze" | "reshape" | "broadcast_in_dim":
                return inputs[:1]
            case "mul":
                return [prod(inputs)]
            case "multiple_of":
                return [lcm(inputs[0] or 1, *params["values"])]
            case _ if name in COMMON:
                return [gcd(*inputs[name == "select_n" :])]
            case "cond":
                branches = [self.run(_body(one), inputs[1:]) for one in params["branches"]]
                return [gcd(*each) for each in zip(*branches, strict=True)]
            case "while":
                asked, fixed = params["cond_nconsts"], params["body_nconsts"]
                carried = unknown
                self.run(_body(params["cond_jaxpr"]), [*inputs[:asked], *carried])
                self.run(_body(params["body_jaxpr"]), [*inputs[asked : asked + fixed], *carried])
                return unknown
        bodies = list(_bodies(params))
        for one in bodies:
            same = len(one.invars) == len(inputs)
            given = inputs if same and name != "scan" else [ANYTHING] * len(one.invars)
            found = self.run(one, given)
            if len(bodies) == 1 and same and name != "scan":
                return found
        return unknown

    def look(self, equation: Any, known: dict[Any, int]) -> None:
        """Notes what an access or a copy does that the compiler refuses."""
        name, params = equation.primitive.name, equation.params
        if name in ("get", "swap"):
            reference, *rest = equation.invars
            transforms = params["tree"].unflatten(rest[name == "swap" :])
            self.check(name, reference, transforms, known)
        elif name in ("masked_load", "masked_swap"):
            reference, transforms, *_ = params["args_tree"].unflatten(equation.invars)
            self.check(name, reference, transforms, known)
        elif name == "dma_start":
            source, target, *_ = params["tree"].unflatten(equation.invars)
            for one in (source, target):
                self.check("a copy", *_whole(one), known)

    def check(self, what: str, reference: Any, transforms: Any, known: dict[Any, int]) -> None:
        shape, kind = reference.aval.shape, reference.aval.dtype
        dimensions = list(range(len(shape)))
        steps = [0] * len(shape)  # divisors of the offsets that are chosen at run time
        for one in transforms:
            if not hasattr(one, "indices"):
                if what == "a copy":
                    self.views[f"{what} of {kind}{list(shape)} as {type(one).__name__}"] = None
                return
            kept = []
            for dimension, index in zip(dimensions, one.indices, strict=True):
                sliced = hasattr(index, "size") and hasattr(index, "start")
                start = index.start if sliced else index
                if not isinstance(start, int):
                    steps[dimension] = gcd(steps[dimension], divisor(known, start))
                if sliced:
                    kept.append(dimension)
            dimensions = kept
        packed = getattr(kind, "itemsize", WORD_BYTES) < WORD_BYTES
        if packed and len(shape) > 1 and steps[-2] % TILE_ROWS:
            text = f"{what} of rows of {kind}{list(shape)} from a multiple of {steps[-2]}"
            self.rows[text] = None


def runtime_places(kernel: Any) -> Offsets:
    """What a traced kernel accesses and copies, with nothing known of its arguments."""
    found = Offsets()
    found.run(kernel, [ANYTHING] * len(kernel.invars))
    return found


def divisor(known: dict[Any, int], value: Any) -> int:
    """A number that surely divides a scalar; 0 is divided by all."""
    number = getattr(value, "val", value)
    if getattr(number, "shape", ()) or hasattr(value, "aval") and not hasattr(value, "val"):
        return known.get(value, ANYTHING)
    return abs(int(number)) if float(number).is_integer() else ANYTHING


def _whole(reference: Any) -> tuple[Any, list[Any]]:
    """A reference and all its transforms, outermost last."""
    if not hasattr(reference, "transforms"):
        return reference, []
    inner, transforms = _whole(reference.ref)
    return inner, [*transforms, *reference.transforms]


def _body(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _bodies(params: Any) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = _body(one)
            if hasattr(inner, "eqns"):
                yield inner
