"""Sums that do not need each other share an exchange."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mkc
from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.passes.p10_shard import Shard
from mkc.passes.rank_ops import JoinParts
from mkc.schedule.decisions import DecisionLog
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN, WIDE = 512, 256, 512

type Decoder = Callable[[mkc.Step], mkc.Outputs]


def branches(hidden: int = HIDDEN, *, dependent: bool = False, parallel: int = 2) -> Decoder:
    """A layer with MLPs side by side, or one behind the other; results are used differently."""

    def build(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, hidden]))
        for layer in mkc.layers(2):
            x = mkc.rms_norm(h, layer.param("norm.weight", [hidden]), eps=1e-6)
            total: mkc.Tensor | None = None
            for number in range(parallel):
                read = x if total is None or not dependent else total
                up = mkc.linear(read, layer.param(f"{number}.up.weight", [WIDE, hidden]))
                down = layer.param(f"{number}.down.weight", [hidden, WIDE])
                out = mkc.linear(mkc.silu(up), down)
                total = out if total is None else total + mkc.silu(out)
            assert total is not None
            h = h + total
        x = mkc.rms_norm(h, mkc.param("norm.weight", [hidden]), eps=1e-6)
        return mkc.next_token(x, mkc.param("head.weight", [VOCAB, hidden]))

    return build


def layer_nodes(decoder: Decoder, *, ranks: int = 2) -> list[Node]:
    graph = mkc.trace(decoder, name="branches", batch=1, context=64)
    body = Shard(ranks=ranks).apply(graph, DecisionLog()).graph.body
    (layer,) = [item for item in body.items if isinstance(item, Repeat)]
    return list(layer.body.nodes())


def mnemonics(block: Block | list[Node]) -> list[str]:
    nodes = block if isinstance(block, list) else list(block.nodes())
    return [one.op.mnemonic for one in nodes]


def test_branches_that_do_not_need_each_other() -> None:
    """Both branches come first, then one sum, then what was in between."""
    found = mnemonics(layer_nodes(branches()))
    assert found.count("all_reduce") == 1
    assert found.index("join_parts") + 1 == found.index("all_reduce")
    assert found.index("split_parts") == found.index("all_reduce") + 1
    assert "linear" not in found[found.index("all_reduce") :]


def test_three_branches_share_an_exchange_as_far_as_they_are_plain() -> None:
    """Two are joined; the third would be joined with what has two parts already."""
    assert mnemonics(layer_nodes(branches(parallel=3))).count("all_reduce") == 2


def test_a_branch_that_reads_the_other_waits_for_it() -> None:
    found = layer_nodes(branches(dependent=True))
    assert mnemonics(found).count("all_reduce") == 2
    assert not any(isinstance(one.op, JoinParts) for one in found)


def test_parts_that_are_no_whole_registers_stay_apart() -> None:
    assert mnemonics(layer_nodes(branches(192))).count("all_reduce") == 2


def test_one_rank_has_nothing_to_join() -> None:
    assert "join_parts" not in mnemonics(layer_nodes(branches(), ranks=1))


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (4, 3)])
def test_the_kernel_agrees_with_the_reference(ranks: int, batch: int) -> None:
    subject = subject_of(branches(), "branches", VOCAB)
    session = session_of(subject, ranks=ranks, batch=batch, mode=Mode.LATE)
    sums = [one for one in session.lowered.program.phases() if hasattr(one, "partial")]
    assert [one.partial.width for one in sums] == [2 * HIDDEN]
    run = run_kernel(session, reference_of(subject), [0] * batch, 2)
    check(run, reference_of(subject))
    assert np.isfinite(run.logits).all()
