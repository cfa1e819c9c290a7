"""What rounds that sample need besides those that are greedy."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir import ops_spec
from mkc.ir.graph import Node
from mkc.passes.steps import StepGraph
from mkc.schedule.program import VECTOR_LANES

FORCED = "forced"  # operand: what a sequence has to emit in the first round of a launch
FORCED_SCALARS = "s_forced"  # the same where rounds read it
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed")  # operands of `accept`, in order


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Operands of acceptance by sampling, by name.

    Attributes:
      options: inputs of the graph in the order of `OPTIONS`.
      proposed: candidates of drafts and their probabilities, inputs that rounds carry on; empty
        for drafts that are certain.
      k: candidates of a draft.
      listed: logits of each rank that all ranks look at: together they fill a vector register.
    """

    options: tuple[str, ...]
    proposed: tuple[str, ...]
    k: int
    listed: int


def samples_of(graph: StepGraph) -> Samples | None:
    """None for a step, and for rounds that are greedy."""
    node = accepting(graph)
    if node is None or len(node.operands) == 3:
        return None
    local = graph.sharded.graph
    options, proposed = node.operands[3:8], node.operands[8:]
    types = {value.name: value.type for value in local.inputs}
    columns = graph.resolve(node.operands[0]).width
    return Samples(
        options=options,
        proposed=proposed,
        k=types[proposed[0]].shape[1] if proposed else 1,
        listed=min(columns, VECTOR_LANES // graph.sharded.ranks),
    )


def accepting(graph: StepGraph) -> Node | None:
    """The node that accepts drafts, if there is one."""
    nodes = graph.sharded.graph.body.nodes()
    return next((one for one in nodes if isinstance(one.op, ops_spec.Accept)), None)


def padded_batch(batch: int) -> int:
    """Rows of a message with one row for each sequence: whole tiles of 8."""
    return -(-batch // 8) * 8
