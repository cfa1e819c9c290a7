"""A mixture behind an exchange in two parts: where, where not, and that it is the same mixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import mkc
from mkc.passes.mixing_parts import MixStored
from mkc.passes.mixing_parts import MixStream
from mkc.passes.pipeline import Lowered
from mkc.passes.steps import Step
from mkc.passes.steps import StepLoop
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import VectorPhase
from mkc.schedule.verify import prove
from mkc.schedule.verify.case import launches_of
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.passes.overlapped import WHOLE
from tests.schedule.verify.test_protocol import compare

VOCAB, HIDDEN, WIDE, LAYERS, SLOTS = 512, 256, 512, 3, 4

type Build = Callable[[mkc.Step], mkc.Outputs]


def mix(
    stored: mkc.StoredBlocks, h: mkc.Tensor, param: Callable[..., mkc.Tensor], name: str
) -> mkc.Tensor:
    return mkc.mix_blocks(
        stored,
        h,
        norm=param(f"{name}.norm.weight", [HIDDEN]),
        projection=param(f"{name}.proj.weight", [1, HIDDEN]),
        eps=1e-5,
    )


def mlp(x: mkc.Tensor, layer: mkc.Layer, name: str) -> mkc.Tensor:
    """Its result is a sum over ranks."""
    up = mkc.linear(x, layer.param(f"{name}.up.weight", [WIDE, HIDDEN]))
    return mkc.linear(mkc.silu(up), layer.param(f"{name}.down.weight", [HIDDEN, WIDE]))


def decoder(*, late: bool = False) -> Build:
    """Layers of two MLPs, each behind a mixture; a block is stored in front of each layer, or
    `late`, between the first sum and the mixture behind it.
    """

    def build(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        blocks = mkc.residual_blocks(h, SLOTS)
        for layer in mkc.layers(LAYERS):
            if not late:
                blocks, h = mkc.store_block(blocks, h)
            total = mlp(mix(blocks, h, layer.param, "first"), layer, "first")
            if late:
                blocks, h = mkc.store_block(blocks, h)
            h = h + total
            h = h + mlp(mix(blocks, h, layer.param, "second"), layer, "second")
        x = mix(blocks, h, mkc.param, "last")
        return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))

    return build


@cache
def lowered(ranks: int = 2, passes: str = "", *, late: bool = False) -> Lowered:
    graph = mkc.trace(decoder(late=late), name="mixtures", batch=1, context=64)
    return lower(graph, ranks, passes)


def mixtures(body: tuple[Step | StepLoop, ...]) -> list[str]:
    """Operations of mixtures and parts of exchanges, in order; those of loops as they stand."""
    found = []
    for item in body:
        if isinstance(item, StepLoop):
            found += ["loop", *mixtures(item.body), "end"]
        elif item.part is not Part.WHOLE:
            found.append(str(item.part))
        else:
            names = (node.op.mnemonic for node in item.nodes)
            found += [one for one in names if one.startswith(("mix", "store", "all_reduce"))]
    return found


def test_the_stored_part_goes_on_during_the_exchange() -> None:
    """The first mixture of a layer follows an exchange of the layer before it, and is whole."""
    assert mixtures(lowered().steps.body) == [
        "loop", "store_block", "mix_blocks",
        "start", "mix_stored", "finish", "mix_stream", "all_reduce", "end",
        "mix_blocks",
    ]  # fmt: skip


def test_blocks_that_are_stored_behind_the_exchange() -> None:
    assert mixtures(lowered(late=True).steps.body) == [
        "loop", "mix_blocks", "all_reduce", "store_block", "mix_blocks", "all_reduce", "end",
        "mix_blocks",
    ]  # fmt: skip


@pytest.mark.parametrize(("ranks", "passes"), [(1, ""), (2, WHOLE)])
def test_nothing_to_go_on_with(ranks: int, passes: str) -> None:
    """Without an exchange, and where exchanges have no parts."""
    found = mixtures(lowered(ranks, passes).steps.body)
    assert found.count("mix_blocks") == 3 and "mix_stored" not in found


def test_parts_of_a_mixture_are_of_its_operands() -> None:
    nodes = [node for step in lowered().steps.steps() for node in step.nodes]
    (stored,) = [node for node in nodes if isinstance(node.op, MixStored)]
    (stream,) = [node for node in nodes if isinstance(node.op, MixStream)]
    assert stored.op == MixStored(eps=1e-5) and stream.op == MixStream(eps=1e-5)
    assert [str(one.type) for one in stored.results] == ["f32[1, 256]", "f32[1, 2]"]
    assert tuple(one.name for one in stored.results) == stream.operands[1:3]
    assert stored.operands[2:] == stream.operands[3:]


def test_the_choice_is_recorded() -> None:
    found = [one for one in lowered().log.decisions if one.id.startswith("fuse.mixture.")]
    assert [one.passed for one in found] == ["fuse"]
    assert not any(one.id.startswith("fuse.mixture.") for one in lowered(2, WHOLE).log.decisions)


def swapped(program: Program, first: Phase, second: Phase) -> Program:
    """The program with two phases in each other's place."""

    def changed(item: Phase | Loop) -> Phase | Loop:
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(changed, item.body)))
        return {first.id: second, second.id: first}.get(item.id, item)

    return replace(program, body=tuple(map(changed, program.body)))


def codes(program: Program) -> set[str]:
    target = load_target(TARGET)
    return {one.code for one in prove([program] * program.ranks, target).issues}


def test_a_stream_that_joins_what_is_not_summed_yet_is_found() -> None:
    program = lowered().program
    assert codes(program) == set()
    vectors = [one for one in program.phases() if isinstance(one, VectorPhase)]
    (stored,) = [one for one in vectors if any(isinstance(n.op, MixStored) for n in one.nodes)]
    (stream,) = [one for one in vectors if any(isinstance(n.op, MixStream) for n in one.nodes)]
    assert "V203" in codes(swapped(program, stored, stream))


def test_the_kernel_does_what_the_proof_is_about() -> None:
    one = lowered()
    compare(one, [0, 1], launches_of(one.program))


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (4, 3)])
def test_the_kernel_agrees_with_the_reference(ranks: int, batch: int) -> None:
    subject = subject_of(decoder(), "mixtures", VOCAB)
    session = session_of(subject, ranks=ranks, batch=batch, mode=Mode.LATE)
    starts = [
        one
        for one in session.lowered.program.phases()
        if isinstance(one, AllReducePhase) and one.part is Part.START
    ]
    assert len(starts) == 1
    check(run_kernel(session, reference_of(subject), [0] * batch, 3), reference_of(subject))
