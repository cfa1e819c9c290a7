"""Sound programs of different structure, to be spoiled."""

from __future__ import annotations

from functools import cache

from mkc.schedule.program import Program
from tests.passes.lowering import dense_graph
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.stacks import Stack

ROUNDS = 4


@cache
def subject(name: str) -> Program:
    """`one`, `two` and `eight` ranks; `rounds` in one launch; `shares` of two-phase sums."""
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
        case "rounds":
            return lower(golden_graph("qwen38_mini"), 2, f"lower{{rounds={ROUNDS}}}").program
        case "meets":
            return lower(Stack(pattern="mmmm", hidden=192, vocab=512).graph(), 2).program
        case _:
            raise AssertionError(name)
