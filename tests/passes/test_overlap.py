"""What goes on during an exchange, and what keeps its place."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mkc.ir.graph import Carry
from mkc.ir.graph import Node
from mkc.ir.graph import Value
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Linear
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.passes.lifetimes import lifetimes
from mkc.passes.overlap import in_order
from mkc.passes.overlap import overlapped
from mkc.passes.p20_fuse import Fuse
from mkc.passes.pipeline import Lowered
from mkc.passes.steps import Step
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from tests.mutation.edits import with_bodies
from tests.mutation.edits import with_one
from tests.passes.kimi import divided
from tests.passes.kimi import full_kimi
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lower
from tests.passes.machine import MachineError
from tests.passes.machine import run_program
from tests.passes.meaning import Symbols
from tests.passes.overlapped import WHOLE
from tests.passes.overlapped import between
from tests.passes.overlapped import ends
from tests.passes.overlapped import lower_overlapped
from tests.passes.overlapped import overlapped_graph
from tests.passes.overlapped import starts
from tests.passes.test_meaning import assert_same_meaning
from tests.passes.test_p20_fuse import outline

NOT_MOVED = (  # states, caches, lookups, scalars, what is stored in place, other exchanges
    StepKind.EMBED,
    StepKind.DELTA_RULE,
    StepKind.KEPT_DELTA_RULE,
    StepKind.ATTENTION,
    StepKind.ROWS_ATTENTION,
    StepKind.LATENT_ATTENTION,
    StepKind.ALL_REDUCE,
    StepKind.ALL_GATHER,
    StepKind.ARGMAX,
    StepKind.TOP_K,
    StepKind.TAP,
    StepKind.BLOCKS,
    StepKind.SCALAR,
    StepKind.ROUTE,
    StepKind.EXPERTS,
)

SUMS = (
    "algorithm=one_shot",
    "algorithm=two_phase",
    "algorithm=two_phase,wire=bf16",
    "algorithm=two_level",
    "algorithm=two_step",
)


def node(
    reads: str, makes: str, *, states: str = "", width: int = 128, dtype: str = "bf16"
) -> Node:
    """A node by the names of its operands, results and states, one word each."""
    kind = TensorType(dtype=DType(dtype), axes=(axis(1), axis(width)))
    return Node(
        op=Linear(),
        operands=tuple(reads.split()),
        states=tuple(states.split()),
        results=tuple(Value(name=name, type=kind) for name in makes.split()),
    )


def step(kind: StepKind, reads: str, makes: str, *, states: str = "") -> Step:
    return Step(id="", kind=kind, nodes=(node(reads, makes, states=states),))


SUM = replace(
    step(StepKind.ALL_REDUCE, "partial", "total"),
    nodes=(replace(node("partial", "total"), op=AllReduce(ranks=2)),),
)


def order(steps: Sequence[Step | StepLoop], bases: Mapping[str, str] | None = None) -> list[str]:
    """What the steps make when exchanges have been overlapped, in order."""
    return described(overlapped(tuple(steps), bases or {}))


def described(body: tuple[Step | StepLoop, ...]) -> list[str]:
    lines = []
    for one in body:
        if isinstance(one, StepLoop):
            lines.append(one.name)
            continue
        name = one.nodes[0].results[0].name
        lines.append(name if one.part is Part.WHOLE else f"{name} {one.part}")
    return lines


BESIDE = step(StepKind.VECTOR, "other", "beside")


def test_an_exchange_with_nothing_beside_it_stays_whole() -> None:
    makes = step(StepKind.MATMUL, "x", "partial")
    reads = step(StepKind.VECTOR, "total", "y")
    assert order([makes, SUM, reads]) == ["partial", "total", "y"]


@pytest.mark.parametrize("kind", [StepKind.VECTOR, StepKind.MATMUL, StepKind.NARROW_MATMUL])
def test_what_needs_no_result_moves_before_the_end(kind: StepKind) -> None:
    """The matmul that needs the sum stays behind, and everything behind that."""
    beside, more = step(kind, "other", "beside"), step(kind, "beside", "more")
    reads = step(StepKind.MATMUL, "total", "y")
    late = step(StepKind.VECTOR, "other", "late")
    assert order([SUM, beside, more, reads, late]) == [
        "total start", "beside", "more", "total finish", "y", "late",
    ]  # fmt: skip


def test_what_makes_no_operand_moves_behind_the_start() -> None:
    """Back to the step that makes what is sent; what stands before that stays where it is."""
    early = step(StepKind.VECTOR, "other", "early")
    makes = step(StepKind.MATMUL, "x", "partial")
    reads = step(StepKind.VECTOR, "total beside", "y")
    assert order([early, makes, BESIDE, SUM, reads]) == [
        "early", "partial", "total start", "beside", "total finish", "y",
    ]  # fmt: skip


def test_lanes_of_a_value_are_that_value() -> None:
    """A matmul makes an operand as lanes beside others; a step reads some lanes of a result."""
    makes = step(StepKind.MATMUL, "x", "beside partial")
    reads = step(StepKind.VECTOR, "half", "y")
    bases = {"beside": "both", "partial": "both", "some": "both", "half": "total"}
    total = replace(SUM, nodes=(replace(SUM.nodes[0], operands=("some",)),))
    assert order([makes, total, reads], bases) == ["beside", "total", "y"]
    assert order([makes, total, reads]) == ["total start", "beside", "y", "total finish"]


@pytest.mark.parametrize("kind", NOT_MOVED)
@pytest.mark.parametrize("behind", [False, True])
def test_what_keeps_its_place(kind: StepKind, behind: bool) -> None:
    """And nothing moves past it: `beside` stands on the other side of it."""
    kept = step(kind, "given", "kept")
    items = [SUM, kept, BESIDE] if behind else [BESIDE, kept, SUM]
    assert "total" in order(items), "the sum is whole"


@pytest.mark.parametrize("behind", [False, True])
def test_a_chain_with_a_state_keeps_its_place(behind: bool) -> None:
    """Its state comes through a ring whose items are counted in program order."""
    kept = step(StepKind.VECTOR, "other", "kept", states="conv")
    assert order([SUM, kept] if behind else [kept, SUM]) == (
        ["total", "kept"] if behind else ["kept", "total"]
    )


@pytest.mark.parametrize("behind", [False, True])
def test_a_loop_keeps_its_place(behind: bool) -> None:
    """An exchange ends in the body in which it has started; inside, the same is done."""
    carry = Carry(initial="a", argument="b", yielded="c", result="d")
    loop = StepLoop(name="layers", count=2, carries=(carry,), body=(SUM, BESIDE))
    items = [SUM, loop] if behind else [loop, SUM]
    assert order(items) == (["total", "layers"] if behind else ["layers", "total"])
    found = next(one for one in overlapped(tuple(items), {}) if isinstance(one, StepLoop))
    assert described(found.body) == ["total start", "beside", "total finish"]
    assert found.carries == (carry,)


def test_of_two_exchanges_the_first_takes_what_both_could() -> None:
    """They do not overlap each other."""
    second = replace(SUM, nodes=(replace(SUM.nodes[0], results=node("", "second").results),))
    assert order([SUM, BESIDE, second]) == ["total start", "beside", "total finish", "second"]
    more = step(StepKind.VECTOR, "other", "more")
    assert order([SUM, BESIDE, second, more]) == [
        "total start", "beside", "total finish", "second start", "more", "second finish",
    ]  # fmt: skip


def projections(**columns: int) -> list[Node]:
    """Projections of one value: result -> columns, in that order."""
    return [node(f"x {name}.weight", name, width=width) for name, width in columns.items()]


def ordered(nodes: list[Node], *travel: str) -> list[list[str]]:
    parts = in_order(nodes, travel, DecisionLog())
    return [[one.results[0].name for one in part] for part in parts]


def test_what_travels_is_computed_first() -> None:
    nodes = projections(local=TAPE_LANES, sent=TAPE_LANES)
    assert ordered(nodes, "sent") == [["sent"], ["local"]]


@pytest.mark.parametrize("travel", [(), ("a", "b")])
def test_projections_of_which_all_or_none_travel_are_one_matmul(travel: tuple[str, ...]) -> None:
    assert ordered(projections(a=TAPE_LANES, b=TAPE_LANES), *travel) == [["a", "b"]]


def test_no_block_of_weights_is_added() -> None:
    """128 and 384 columns are two blocks together, and three apart."""
    assert ordered(projections(sent=128, local=384), "sent") == [["sent", "local"]]
    assert ordered(projections(sent=128, local=512), "sent") == [["sent"], ["local"]]


def test_the_first_matmul_is_filled_up_with_others() -> None:
    """So that as much as possible is left: of 128 + 640 columns the 128 go along."""
    nodes = projections(sent=128, few=128, many=512)
    assert ordered(nodes, "sent") == [["sent", "few"], ["many"]]


def test_as_much_as_possible_is_left() -> None:
    """Either of the two would fill the first block; and no more goes along than has to."""
    nodes = projections(sent=128, wide=384, few=128, free=384)
    assert ordered(nodes, "sent") == [["sent", "few"], ["wide", "free"]]


def test_results_keep_their_order_within_a_matmul() -> None:
    """Exact f32 columns lie behind those that are rounded, in both."""
    exact = node("x e.weight", "exact", width=128, dtype="f32")
    last = node("x l.weight", "last", width=TAPE_LANES, dtype="f32")
    nodes = [*projections(first=TAPE_LANES, sent=128), exact, last]
    assert ordered(nodes, "sent") == [["sent", "exact"], ["first", "last"]]
    nodes = [*projections(few=128), replace(exact, results=exact.results), last]
    assert ordered(nodes, "exact") == [["few", "exact"], ["last"]]


def test_the_choice_is_recorded() -> None:
    log = DecisionLog()
    in_order(projections(local=TAPE_LANES, sent=TAPE_LANES), ["sent"], log)
    (choice,) = log.decisions
    assert (choice.id, choice.passed) == ("fuse.first.sent", "fuse")
    assert choice.chosen == "with sent.weight before the exchange, local.weight beside it"
    assert list(choice.rejected) == ["one matmul before the exchange"]
    in_order(projections(sent=128, local=384), ["sent"], (quiet := DecisionLog()))
    assert quiet.decisions == []


def lowered_with(sums: str) -> Lowered:
    """The example on four ranks; sums of several rows have the algorithm that is asked for."""
    batch = 1 if "two_step" in sums else 3
    one = lower_overlapped(ranks=4, batch=batch, passes=f"collectives{{{sums},group=2}}")
    found = {item.algorithm for item in one.program.phases() if isinstance(item, AllReducePhase)}
    assert found == {sums.removeprefix("algorithm=").split(",")[0]}
    return one


def layer(passes: str = "") -> list[str]:
    """The body of the loop of the example."""
    body = lower_overlapped(passes=passes).steps.body
    (loop,) = [one for one in body if isinstance(one, StepLoop)]
    lines = outline(loop.body)
    parts = [one.part for one in loop.body if isinstance(one, Step)]
    return [
        f"{line} {part}" if part is not Part.WHOLE else line
        for line, part in zip(lines, parts, strict=True)
    ]


def test_a_layer_with_a_gather_and_a_sum() -> None:
    assert layer() == [
        "vector rms_norm",
        "matmul inner",
        "all_gather all_gather start",
        "matmul side",
        "all_gather all_gather finish",
        "vector rms_norm unary",
        "matmul down",
        "all_reduce all_reduce start",
        "matmul outer",
        "all_reduce all_reduce finish",
        "all_gather all_gather",
        "vector binary binary",
    ]


def test_without_the_option_everything_is_done_as_before() -> None:
    assert layer(WHOLE) == [
        "vector rms_norm",
        "matmul side inner",
        "all_gather all_gather",
        "vector rms_norm unary",
        "matmul down",
        "all_reduce all_reduce",
        "matmul outer",
        "all_gather all_gather",
        "vector binary binary",
    ]
    one = lower_overlapped(passes=WHOLE)
    assert starts(one.program) == []
    assert not any(choice.id.startswith("fuse.first") for choice in one.log.decisions)


def test_a_layer_without_anything_beside_its_exchanges_is_left_alone() -> None:
    """The program is the same, with the option and without."""
    assert lower(dense_graph(), 2).program == lower(dense_graph(), 2, WHOLE).program


@pytest.mark.parametrize("sums", SUMS)
def test_both_parts_name_the_same_buffers(sums: str) -> None:
    """Only the end lets ranks meet. Between them stand the matmuls that moved."""
    program = lowered_with(sums).program
    assert [type(one).__name__ for one in starts(program)] == ["AllGatherPhase", "AllReducePhase"]
    for start, end in zip(starts(program), ends(program), strict=True):
        assert not start.meets
        assert replace(end, id=start.id, title=start.title, part=Part.START, meets=False) == start
        assert any(isinstance(one, MatmulPhase) for one in between(program, start))


def test_ranks_meet_behind_the_end_only() -> None:
    """Where nothing is gathered the sums of all layers follow each other, in the same buffers."""
    program = lower(overlapped_graph(), 8).program
    (start,), (end,) = starts(program), ends(program)
    assert (start.meets, end.meets) == (False, True)


def test_the_result_needs_no_memory_before_the_end() -> None:
    """What is sent keeps its memory until then."""
    steps = lower_overlapped().steps
    order = list(steps.steps())
    (start,) = [n for n, one in enumerate(order) if one.kind is StepKind.ALL_REDUCE][:1]
    assert (order[start].part, order[start + 2].part) == (Part.START, Part.FINISH)
    (partial,), (total,) = order[start].nodes[0].operands, order[start].nodes[0].results
    found = {name: one for one in lifetimes(steps) for name in one.values}
    assert found[total.name].first == start + 2
    assert found[partial].last == start + 2


@pytest.mark.parametrize("sums", SUMS)
def test_the_program_computes_the_graph(sums: str) -> None:
    """The results of an exchange are nowhere before its end."""
    assert_same_meaning(lowered_with(sums))


@pytest.mark.parametrize("place", [0, -1])
def test_an_end_behind_what_reads_the_result_is_noticed(place: int) -> None:
    """The check itself. With the first exchange the reader follows, with the last one it does not
    end before another one begins."""
    one = lower_overlapped()
    end = ends(one.program)[place]

    def last(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        return (*(item for item in body if item is not end), *(one for one in body if one is end))

    spoiled = replace(one, program=with_bodies(one.program, last))
    with pytest.raises(AssertionError):
        assert_same_meaning(spoiled)


@pytest.mark.parametrize("sums", SUMS)
def test_partial_sums_that_are_overwritten_on_their_way_are_noticed(sums: str) -> None:
    """Two phases of f32 send them from where they are; all others have copied them first."""
    one = lowered_with(sums)
    start = starts(one.program)[-1]
    assert isinstance(start, AllReducePhase)
    (work,) = between(one.program, start)
    assert isinstance(work, MatmulPhase)
    partial = next(item for item in one.program.buffers if item.name == start.partial.buffer)
    shared = replace(
        one.program,
        buffers=with_one(
            one.program.buffers,
            lambda item: item.name == work.output.buffer,
            region=partial.region,
            region_lanes=partial.region_lanes,
        ),
    )
    spoiled = replace(one, program=shared)
    if sums == "algorithm=two_phase":
        with pytest.raises(MachineError, match="on their way"):
            run_program(spoiled, Symbols())
    else:
        assert_same_meaning(spoiled)


def test_shared_experts_go_on_while_the_input_of_routed_ones_travels() -> None:
    """Of the full model on 32 ranks; no block of weights is added."""
    sharded, _ = divided(full_kimi(), 32)
    log = DecisionLog()
    split = Fuse().apply(sharded, log)
    first = [one for one in log.decisions if one.id.startswith("fuse.first.")]
    assert all("shared_experts" in one.chosen.split("before")[1] for one in first)
    beside = [one for one in split.steps() if one.part is Part.START]
    assert len(beside) >= len(first) > 0
    whole = Fuse(overlap=False).apply(sharded, DecisionLog())
    assert weight_blocks(split.body) == weight_blocks(whole.body)


def weight_blocks(body: Sequence[Step | StepLoop]) -> int:
    """Blocks of columns of all matmuls."""
    total = 0
    for one in body:
        if isinstance(one, StepLoop):
            total += one.count * weight_blocks(one.body)
        elif one.kind is StepKind.MATMUL:
            columns = sum(value.type.shape[-1] for item in one.nodes for value in item.results)
            total += -(-columns // TAPE_LANES)
    return total
