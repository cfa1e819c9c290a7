"""What every scheme makes, and what they share while they record it.

The loop around a round is the same for all schemes. It feeds the inputs, runs the graph, takes
`count` tokens of `emitted` for every sequence, and feeds the outputs named `carried` to the inputs
of the same name; a sequence whose rows are all padding keeps what it had. It ends a sequence by
making its rows padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from mkc.ir.builder import Outputs
from mkc.ir.builder import Step
from mkc.ir.builder import Tensor
from mkc.ir.builder import Trace
from mkc.ir.builder import apply
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import NextPositions
from mkc.ir.token_masks import with_token_masks
from mkc.ir.types import DType

DRAFT_NAMESPACE = "draft."  # before the names of a drafter's tensors and states
KEPT = "kept"  # rows of the round before that are to be committed
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True, kw_only=True)
class Round:
    """A scheme applied to models.

    Attributes:
      name: of the scheme.
      graph: one round: `rows_per_sequence` rows for each sequence, its newest token and drafts.
        Inputs: `tokens`, `positions` i32 [rows], padding where there is no draft; what is carried;
        unless rounds are greedy `temperature`, `top_p`, `min_p` f32 [batch], `top_k` i32 [batch],
        `seed` i32 [batch, 2].
        Outputs: `emitted` i32 [rows], `count` i32 [batch], `logits` [rows, vocab]; `carried`.
      prefill: one row per sequence, for prompts; its states are those of `graph` that outlive a
        round, and have the same keys. With kept = 0 the round behind it commits nothing.
      carried: inputs of a round that are outputs of the one before.
    """

    name: str
    graph: Graph
    prefill: Graph
    carried: tuple[str, ...]

    def __post_init__(self) -> None:
        mine = {key: (one.type, one.indices) for key, one in self.graph.states.items()}
        for key, one in self.prefill.states.items():
            assert mine.get(key) == (one.type, one.indices), (
                f"state {key} of prefill is another one"
            )
        lasting = {k for k, one in self.graph.states.items() if one.kind in LASTING}
        assert lasting == self.prefill.states.keys() - taps(self.prefill), "states differ"

    @property
    def masked(self) -> Round:
        """The round with the input `token_masks` of its graph; see `mkc.ir.token_masks`."""
        return replace(self, graph=with_token_masks(self.graph))

    @property
    def drafts(self) -> int:
        """The most drafts of a sequence in one round."""
        return self.graph.rows_per_sequence - 1


LASTING = (StateKind.KV_CACHE, StateKind.RECURRENT, StateKind.CONV)


def taps(graph: Graph) -> set[str]:
    """Keys of states that live within a step only."""
    return {key for key, one in graph.states.items() if one.kind is StateKind.TAP}


def without_unread(graph: Graph) -> Graph:
    """`graph` without the nodes outside of regions that nobody reads, such as a model's argmax."""
    read = set(graph.outputs.values())
    kept: list[Node | Repeat] = []
    for item in reversed(graph.body.items):
        nodes = list(item.body.nodes()) if isinstance(item, Repeat) else [item]
        results = {value.name for node in nodes for value in node.results}
        if isinstance(item, Repeat) or item.states or results & read:
            kept.append(item)
            read |= {name for node in nodes for name in node.operands}
            if isinstance(item, Repeat):
                read |= {carry.initial for carry in item.carries} | _inner_reads(item)
    return replace(graph, body=Block(items=tuple(reversed(kept))))


def _inner_reads(region: Repeat) -> set[str]:
    """Values that enter the regions of a region; some are defined in it."""
    inner = [item for item in region.body.items if isinstance(item, Repeat)]
    entering = {carry.initial for one in inner for carry in one.carries}
    return entering.union(*(_inner_reads(one) for one in inner))


def step_of(record: Trace) -> Step:
    """The step that a target's function gets."""
    return Step(
        rows=record.rows,
        batch=record.batch,
        context=record.context,
        tokens=record.inputs["tokens"],
        positions=record.inputs["positions"],
    )


def sampling_inputs(record: Trace) -> tuple[Tensor, ...]:
    """Inputs named `SAMPLING`, in order, one entry per sequence."""
    batch = record.batch
    return (
        record.new_input("temperature", DType.F32, batch),
        record.new_input("top_k", DType.I32, batch),
        record.new_input("top_p", DType.F32, batch),
        record.new_input("min_p", DType.F32, batch),
        record.new_input("seed", DType.I32, batch, 2),
    )


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Results of `accept_and_advance`: what was emitted, how many, the last one; next positions."""

    emitted: Tensor
    count: Tensor
    last: Tensor
    positions: Tensor


def accept_and_advance(
    record: Trace, target: Outputs, sampling: tuple[Tensor, ...], *proposal: Tensor
) -> Accepted:
    """Accepts drafts by the target's logits, and moves on.

    Args:
      sampling: inputs named `SAMPLING`; nothing accepts greedily.
      proposal: candidates and their probabilities; without them drafts are certain.
    """
    tokens, positions = record.inputs["tokens"], record.inputs["positions"]
    operands = (target.logits, tokens, positions, *sampling, *proposal)
    emitted, count, last = apply(Accept(rows=record.rows // record.batch), *operands)
    (moved,) = apply(NextPositions(context=record.context), positions, count)
    return Accepted(emitted=emitted, count=count, last=last, positions=moved)
