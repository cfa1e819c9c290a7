"""Waits for other ranks are counted by the farthest link that their messages use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.simulate import predict
from mkc.schedule.simulate.analysis import Window
from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.exchange_chains import ExchangeChains
from mkc.schedule.simulate.exchange_chains import exchange_chains
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Wait
from mkc.targets import load_target
from tests.passes.lowering import golden_graph
from tests.schedule.simulate.machines import ranks
from tests.schedule.simulate.machines import work

RANKS = 16  # two hosts
SIBLING, CHIP, HOST = 1, 2, 8  # distances by exclusive or


def sends(rank: int, *distances: int, layer: int = -1) -> Iterator[Instruction]:
    for distance in distances:
        mark = Mark(phase="p", layer=layer)
        yield Send(mark=mark, peer=rank ^ distance, bytes=4, semaphore="arrived", sent="sent")


def waits(*names: str, messages: int, layer: int = -1) -> Iterator[Instruction]:
    for name in names:
        mark = Mark(phase="p", layer=layer)
        yield Wait(mark=mark, bytes=4 * messages, semaphore=name, stall=Stall.EXCHANGE)


def exchange(rank: int, *distances: int, layer: int = -1) -> Iterator[Instruction]:
    yield from sends(rank, *distances, layer=layer)
    yield from waits("arrived", "sent", messages=len(distances), layer=layer)


def counted(run: Run) -> ExchangeChains:
    return exchange_chains(run, Window(rank=0, start_us=0.0, end_us=run.end_us[0]))


def test_a_phase_counts_once_under_its_farthest_link() -> None:
    """However many messages, and although it waits for what was sent, too."""
    run = ranks(RANKS, lambda rank: exchange(rank, HOST, CHIP, SIBLING))
    assert counted(run) == ExchangeChains(round={"host": 1}, loop_body={})


def test_the_loop_body_with_most_phases_is_told() -> None:
    def kernel(rank: int) -> Iterator[Instruction]:
        yield from exchange(rank, SIBLING)
        yield from exchange(rank, SIBLING, layer=0)
        yield from exchange(rank, CHIP, layer=1)
        yield from exchange(rank, HOST, layer=1)

    found = counted(ranks(RANKS, kernel))
    assert found == ExchangeChains(
        round={"sibling": 2, "chip": 1, "host": 1}, loop_body={"chip": 1, "host": 1}
    )


def test_messages_on_their_way_together_are_one_phase() -> None:
    """Two exchanges that were both begun before either was waited for."""

    def kernel(rank: int) -> Iterator[Instruction]:
        yield from sends(rank, CHIP)
        yield work(0.1)
        yield from sends(rank, HOST)
        yield from waits("arrived", "arrived", "sent", "sent", messages=1)

    assert counted(ranks(RANKS, kernel)).round == {"host": 1}


def test_a_window_counts_what_was_sent_in_it() -> None:
    run = ranks(RANKS, lambda rank: [*exchange(rank, CHIP), work(1.0), *exchange(rank, HOST)])
    late = Window(rank=0, start_us=run.end_us[0] / 2, end_us=run.end_us[0])
    assert exchange_chains(run, late).round == {"host": 1}


def test_two_sums_a_layer_and_the_choice_of_the_token() -> None:
    """Of a model with four layers; two phases each when that algorithm is asked for."""
    target = load_target("tpu7x:2x2x1")
    pipeline = Pipeline(shard=Shard(ranks=4), lower=Lower(rounds=4))
    graph = golden_graph("qwen38_lane")
    for algorithm, phases in (("one_shot", 1), ("two_phase", 2)):
        collectives = replace(pipeline.collectives, algorithm=algorithm)
        program = replace(pipeline, collectives=collectives).run(graph, target).program
        found = predict(program, target).exchanges
        assert found.round == {"chip": 4 * 2 * phases + 1}
        assert found.loop_body == {"chip": 2 * phases}
