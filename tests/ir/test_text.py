"""The text form: what it looks like, that it parses back to the same graph, what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from mkc.errors import UnsupportedOpError
from mkc.ir.facets import MNEMONICS
from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.ops import Activation
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import Cast
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import L2Norm
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import NormRounding
from mkc.ir.ops import NormWeight
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Slice
from mkc.ir.ops import Unary
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.text import print_node
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from tests.golden.fixture import GoldenCheck
from tests.ir.small_graph import small_graph


def test_text_of_the_small_graph(golden: GoldenCheck) -> None:
    golden("graph/small.mkc", print_graph(small_graph()))


def test_small_graph_survives_printing_and_parsing() -> None:
    graph = small_graph()
    again = parse(print_graph(graph))
    assert again == graph
    assert list(again.params) == list(graph.params)
    assert print_graph(again) == print_graph(graph)


def test_all_attributes_are_written_and_defaults_may_be_left_out() -> None:
    norm = next(node for node in small_graph().body.nodes() if isinstance(node.op, RmsNorm))
    text = print_node(small_graph(), norm)
    assert "{eps = 1e-06, weight = plain, rounding = once}" in text
    shorter = print_graph(small_graph()).replace(", weight = plain, rounding = once", "")
    assert parse(shorter) == small_graph()


def test_comments_and_blanks_do_not_matter() -> None:
    text = print_graph(small_graph())
    spread = text.replace("{\n", "{  # a comment\n\n\t").replace(", ", " ,\n ")
    assert spread != text
    assert parse(spread) == small_graph()


def test_numbered_layers_are_written_as_progressions() -> None:
    def indices(*numbers: int) -> str:
        param = replace(small_graph().params["norm"], indices=numbers)
        graph = replace(small_graph(), params={"norm": param})
        assert parse(print_graph(graph)).params["norm"].indices == numbers
        return print_graph(graph).split("indices(")[1].split(")")[0]

    assert indices(0, 1, 2, 3) == "0..3"
    assert indices(3, 7, 11, 15) == "3..15 by 4"
    assert indices(0, 1, 2, 4, 5, 6) == "0..2, 4..6"
    assert indices(5, 4, 3) == "5, 4, 3"
    assert indices(2, 2, 2, 9) == "2, 2, 2, 9"


def test_an_op_that_is_not_registered_is_not_printed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unknown(Op):
        mnemonic: ClassVar[str] = "unknown"

    graph = replace(small_graph(), body=Block(items=(Node(op=Unknown(), operands=(), results=()),)))
    with pytest.raises(UnsupportedOpError, match="Unknown"):
        print_graph(graph)


def test_heads_that_a_mesh_may_copy_stay_so() -> None:
    (part,) = parse(print_graph(small_graph())).params["out"].type.axes[1].parts
    assert part.copyable  # not a part of equality, which is about layout
    (part,) = parse(print_graph(small_graph())).params["table"].type.axes[1].parts
    assert not part.copyable


# Attributes of every kind, on an op from outside the tree.


class Colour(StrEnum):
    RED = "red"
    NULL = "null"
    ODD = "two words"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Many(Op):
    mnemonic: ClassVar[str] = "test.many"
    flag: bool
    count: int
    factor: float
    text: str
    colour: Colour | None
    sizes: tuple[int, ...]
    pair: tuple[int, str]
    inner: Inner
    either: int | Inner | None = None


@pytest.fixture(scope="module", autouse=True)
def many_is_registered() -> object:
    register_op(Many, infer=lambda *_: (), reference=lambda *_: ())
    yield
    unregister_op(Many)


ANY_TEXT = st.text(max_size=6)
NAMES = st.one_of(
    st.from_regex(r"[a-z_][a-z0-9_.]{0,4}", fullmatch=True),
    st.sampled_from(["repeat", "output", "yield", "inf", "null", "x", "by", "0", "é", "a b", '"']),
)
SIZES = st.integers(min_value=0, max_value=300)
INNERS = st.builds(Inner, size=SIZES, label=st.none() | ANY_TEXT)
FACTORS = st.floats(allow_nan=False)
LOCATIONS = st.none() | st.builds(Location, file=ANY_TEXT, line=SIZES)
DTYPES = st.sampled_from(DType)

OPS = st.one_of(
    st.just(MergeHeads()),
    st.builds(L2Norm, eps=FACTORS),
    st.builds(
        RmsNorm,
        eps=FACTORS,
        weight=st.sampled_from(NormWeight),
        rounding=st.sampled_from(NormRounding),
    ),
    st.builds(Slice, start=SIZES, size=SIZES),
    st.builds(RotaryTable, theta=FACTORS, dim=SIZES, dtype=DTYPES),
    st.builds(DeltaRule, dtype=DTYPES),
    st.builds(Unary, function=st.sampled_from(Activation), dtype=st.none() | DTYPES),
    st.builds(Binary, function=st.sampled_from(BinaryKind), dtype=st.none() | DTYPES),
    st.builds(Cast, dtype=DTYPES),
    st.builds(
        Many,
        flag=st.booleans(),
        count=st.integers(),
        factor=FACTORS,
        text=ANY_TEXT,
        colour=st.none() | st.sampled_from(Colour),
        sizes=st.lists(st.integers(), max_size=3).map(tuple),
        pair=st.tuples(st.integers(), ANY_TEXT),
        inner=INNERS,
        either=st.none() | st.integers() | INNERS,
    ),
)
PARTS = st.builds(Part, count=SIZES, unit=st.sampled_from([1, 8, 128]), copyable=st.booleans())
AXES = st.builds(Axis, parts=st.lists(PARTS, max_size=3).map(tuple), name=st.just("") | NAMES)
TYPES = st.builds(TensorType, dtype=DTYPES, axes=st.lists(AXES, max_size=3).map(tuple))
VALUES = st.builds(Value, name=NAMES, type=TYPES)
INDICES = st.lists(SIZES, max_size=6).map(tuple)
NODES = st.builds(
    Node,
    op=OPS,
    operands=st.lists(NAMES, max_size=3).map(tuple),
    states=st.lists(NAMES, max_size=2).map(tuple),
    results=st.lists(VALUES, max_size=2).map(tuple),
    location=LOCATIONS,
)
CARRIES = st.builds(Carry, initial=NAMES, argument=VALUES, yielded=NAMES, result=VALUES)


def blocks(items: st.SearchStrategy[Node | Repeat]) -> st.SearchStrategy[Block]:
    return st.builds(Block, items=st.lists(items, max_size=3).map(tuple))


def repeats(items: st.SearchStrategy[Node | Repeat]) -> st.SearchStrategy[Node | Repeat]:
    return st.builds(
        Repeat,
        name=NAMES,
        count=SIZES,
        carries=st.lists(CARRIES, max_size=2).map(tuple),
        body=blocks(items),
        location=LOCATIONS,
    )


ITEMS = st.recursive(NODES, repeats, max_leaves=3)
GRAPHS = st.builds(
    Graph,
    name=ANY_TEXT,
    rows=SIZES,
    batch=SIZES,
    context=SIZES,
    inputs=st.lists(VALUES, max_size=2).map(tuple),
    params=st.lists(
        st.builds(Param, key=NAMES, pattern=ANY_TEXT, type=TYPES, indices=INDICES), max_size=3
    ).map(lambda params: {param.key: param for param in params}),
    states=st.lists(
        st.builds(
            State,
            key=NAMES,
            pattern=ANY_TEXT,
            kind=st.sampled_from(StateKind),
            type=TYPES,
            indices=INDICES,
        ),
        max_size=2,
    ).map(lambda states: {state.key: state for state in states}),
    body=blocks(ITEMS),
    outputs=st.dictionaries(NAMES, NAMES, max_size=2),
    metadata=st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=2),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graph=GRAPHS)
def test_any_graph_survives_printing_and_parsing(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse(text)
    assert again == graph
    assert print_graph(again) == text


def test_every_registered_mnemonic_is_the_one_of_its_op() -> None:
    assert {mnemonic: op.mnemonic for mnemonic, op in MNEMONICS.items()} == {
        mnemonic: mnemonic for mnemonic in MNEMONICS
    }
