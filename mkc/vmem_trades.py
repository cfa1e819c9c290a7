"""What to give up where VMEM is short, chosen by predicted time.

Large loads and long tiles of caches save the core time, a deep ring saves it waits for the tape.
Where the ring gets fewer slots than it should have, the passes run again with smaller loads and
with shorter tiles, every program is simulated, and the fastest is taken.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.errors import VmemError
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.passes.pipeline import Prepared
from mkc.passes.streams import LARGEST_TILE
from mkc.schedule.program import Program
from mkc.schedule.simulate import simulate
from mkc.targets import Target

PASS = "residency"


def lower_within_vmem(pipeline: Pipeline, prepared: Prepared, target: Target) -> Lowered:
    """The program of the fastest choice. Raises the `VmemError` of the first when none fits."""
    error: VmemError | None = None
    found: dict[str, Lowered] = {}
    for name, one in _choices(pipeline, target).items():
        try:
            found[name] = one.finish(prepared, target)
        except VmemError as failure:
            error = error or failure
            continue
        if not found[name].is_short and len(found) == 1 and error is None:
            return found[name]  # nothing has been given up
    if not found:
        assert error is not None
        raise error
    times = {name: _launch_us(one.program, target) for name, one in found.items()}
    best = min(times, key=lambda name: times[name])
    found[best].log.choose(
        "residency.short_vmem",
        passed=PASS,
        chosen=f"{best}, predicted {times[best]:.0f} us",
        because="VMEM is short; large loads, long tiles of caches and a deep ring compete for it",
        rejected={name: f"predicted {us:.0f} us" for name, us in times.items() if name != best},
    )
    return found[best]


def _launch_us(program: Program, target: Target) -> float:
    """Of one round: what the first one has more than others is the same for all choices."""
    return simulate(program, target, rounds=1).prediction.round_us


def any_within_vmem(pipeline: Pipeline, prepared: Prepared, target: Target) -> Lowered:
    """The first choice that fits, without asking for times. Raises as `lower_within_vmem`."""
    error: VmemError | None = None
    for one in _choices(pipeline, target).values():
        try:
            return one.finish(prepared, target)
        except VmemError as failure:
            error = error or failure
    assert error is not None
    raise error


def _choices(pipeline: Pipeline, target: Target) -> dict[str, Pipeline]:
    """The pipeline itself first, then with what has not been asked for made smaller."""
    loads = {"loads as wanted": pipeline.tile}
    if not pipeline.tile.load_bytes:
        usual = target.dma.load_target_bytes
        loads["loads in between"] = replace(pipeline.tile, load_bytes=usual * 3 // 2)
        loads["the target's loads"] = replace(pipeline.tile, load_bytes=usual)
    tiles = {"long tiles of caches": pipeline.residency}
    if not pipeline.residency.cache_tile and not pipeline.residency.largest_tile:
        shorter = replace(pipeline.residency, largest_tile=LARGEST_TILE // 2)
        tiles["shorter tiles of caches"] = shorter
    return {
        f"{load_name}, {tile_name}": replace(pipeline, tile=load, residency=tile)
        for tile_name, tile in tiles.items()
        for load_name, load in loads.items()
    }
