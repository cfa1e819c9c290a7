"""Bytes of report.json: what a step reads, and what of it is padding, for every shipped model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import pytest

from mkc.cli.lookup import model_graph
from mkc.cli.speculation import scheme_round
from mkc.driver import lower_graph
from mkc.ir.mxfp4 import GROUP
from mkc.ir.routing import Routing
from mkc.ir.routing import mean_fullest
from mkc.passes.pipeline import Lowered
from mkc.report import expert_bytes
from mkc.report import floor_us
from mkc.report import rank_bytes
from mkc.report import stream_bytes
from mkc.schedule.simulate import predict
from mkc.targets import load_target
from tests.passes.kimi import small_kimi

CONTEXT = 256


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A model of `mkc models` at full size, with a drafter or none, where it is served."""

    model: str
    drafter: str | None
    topology: str
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.drafter}, batch {self.batch}"


SHIPPED = (
    Shipped(model="qwen38", drafter=None, topology="tpu7x:2x2x1"),
    Shipped(model="qwen38", drafter="dflash2", topology="tpu7x:2x2x1"),
    Shipped(model="kimi_k3", drafter=None, topology="tpu7x:2x2x4", batch=8),
)
MIXTURE = SHIPPED[-1]


@cache
def lowered(case: Shipped) -> Lowered:
    if case.drafter is None:
        graph = model_graph(case.model, batch=case.batch, context=CONTEXT, config_path=None)
    else:
        graph = scheme_round(
            case.model, case.drafter, None, batch=case.batch, context=CONTEXT, config_path=None
        ).graph
    return lower_graph(graph, load_target(case.topology))


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_padding_is_a_small_share_of_the_tape(case: Shipped) -> None:
    """Experts are on neither side of it: a step reads few of those that a rank holds. What is there
    are columns of divided projections that fill no block of the tape."""
    moved = stream_bytes(lowered(case))
    assert 0 <= moved["padding"] < 0.2 * moved["tape"]


def test_experts_are_the_chosen_ones() -> None:
    """Of 896 in each of 92 layers, as many as the fullest group of ranks has; an expert's slice is
    that of the checkpoint in whole tiles of 32 rows of bytes, scales behind codes."""
    program = lowered(MIXTURE).program
    plan = program.experts[0]
    assert (plan.groups, plan.slices) == (2, 16)
    width, inner = 3072 // 16, 3584
    gate_up = (inner // 2 + inner // GROUP + 16) * 2 * width
    down = (width // 2 + width // GROUP + 26) * inner
    read = round(mean_fullest(896, 16, MIXTURE.batch, plan.groups, Routing.UNIFORM))
    assert 16 * 2 < read < 16 * MIXTURE.batch
    assert expert_bytes(program) == 92 * read * (gate_up + down)


def test_a_rank_holds_all_of_its_experts() -> None:
    """Of what a device must have room for, they are the largest part by far."""
    program = lowered(MIXTURE).program
    sizes = {
        role: sum(prod(one.shape) * one.dtype.bytes for one in program.operands if one.role == role)
        for role in ("experts", "table")
    }
    weights, _ = rank_bytes(program)
    assert sizes["experts"] > 0.8 * weights
    assert weights == sum(sizes.values()) + stream_bytes(lowered(MIXTURE))["tape"]


def test_the_floor_has_the_bytes_of_the_chosen_experts() -> None:
    """The same ones that the simulation moves; rows that are alike read fewer."""
    graph = small_kimi(layers=4, latent=(4,), dense=1, batch=4)
    target = load_target("tpu7x:2x2x1")
    one = lower_graph(graph, target, tp=2)
    even, alike = (predict(one.program, target, routing=routing) for routing in Routing)
    rate = target.hbm.sustained_bytes_per_us
    assert even.floor_parts["experts"] == pytest.approx(expert_bytes(one.program) / rate)
    assert even.routing is Routing.UNIFORM
    assert alike.routing is Routing.ALIKE
    assert alike.floor_parts["experts"] < 0.7 * even.floor_parts["experts"]
    assert alike.round_us < even.round_us
    moved = stream_bytes(one)
    read = moved["tape"] + moved["experts"] + moved["state"]
    assert floor_us(one, target) == round(read / rate, 1)
