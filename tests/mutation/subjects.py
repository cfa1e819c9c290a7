"""Sound programs of different structure, to be spoiled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from mkc.ir.graph import Graph
from mkc.schedule.program import Program
from tests.kernel.spark_harness import Case
from tests.kernel.spark_harness import scheme_of
from tests.passes.kimi import small_kimi
from tests.passes.lowering import dense_graph
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.overlapped import lower_overlapped
from tests.passes.stacks import Stack
from tests.schedule.verify.round_programs import round_lowered

ROUNDS = 4
FEW_SLOTS = 3  # of a ring that eight experts pass through
SMALL_TILES = "residency{cache_tile=16}"


@cache
def subject(name: str) -> Program:
    """`one`, `two` and `eight` ranks; `rounds` in one launch; `shares` of two-phase sums, two
    `levels` of sums, sums in two `steps`; exchanges in two
    `parts`, with `scattered` partial sums; rounds of a scheme: `draft` of one sequence, `drafts` of
    two on two ranks, several in a launch; `gathers` of columns; `draw` and `draws` of rounds that
    sample; `experts` of two layers that two rows choose; `walk` of two sequences whose blocks are
    cut."""
    match name:
        case "one":
            return lower(golden_graph("qwen38_mini"), 1).program
        case "two":
            return lower(golden_graph("qwen38_mini"), 2).program
        case "eight":
            return lower(golden_graph("qwen38_lane"), 8).program
        case "dense":
            return lower(dense_graph(batch=2), 2).program
        case "shares":
            return lower(dense_graph(), 2, "collectives{algorithm=two_phase}").program
        case "levels":
            return lower(dense_graph(), 8, "collectives{algorithm=two_level,group=4}").program
        case "steps":
            return lower(dense_graph(), 8, "collectives{algorithm=two_step,group=4}").program
        case "parts":
            return lower_overlapped().program
        case "scattered":
            passes = "collectives{algorithm=two_phase}"
            return lower_overlapped(ranks=4, batch=3, passes=passes).program
        case "rounds":
            return lower(golden_graph("qwen38_mini"), 2, f"lower{{rounds={ROUNDS}}}").program
        case "meets":
            return lower(Stack(pattern="mmmm", hidden=192, vocab=512).graph(), 2).program
        case "draft":
            return round_lowered(1, passes=SMALL_TILES).program
        case "drafts":
            return round_lowered(2, batch=2, rounds=ROUNDS, passes=SMALL_TILES).program
        case "gathers":
            return round_lowered(2, gathers=True, passes=SMALL_TILES).program
        case "draw":
            return round_lowered(1, passes=SMALL_TILES, sampling=True).program
        case "draws":
            return round_lowered(
                2, batch=2, rounds=ROUNDS, passes=SMALL_TILES, sampling=True
            ).program
        case "experts":
            return with_fewer_slots(small_kimi(layers=3, latent=[3], dense=1, batch=2), 2)
        case "walk":
            cut = Case(batch=2, cut=0.5)
            return lower(scheme_of(cut).graph, 2, f"{SMALL_TILES},lower{{rounds={ROUNDS}}}").program
        case _:
            raise AssertionError(name)


def with_fewer_slots(graph: Graph, ranks: int) -> Program:
    """The program of a mixture whose slots are used again; small experts would have one each."""
    program = lower(graph, ranks).program
    rings = tuple(replace(one, slots=FEW_SLOTS) for one in program.expert_rings)
    return replace(program, expert_rings=rings)
