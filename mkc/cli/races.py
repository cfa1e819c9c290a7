"""Runs a plan at reduced size in interpret mode, with late copies and the race detector."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

from mkc.cli.lookup import package_folder
from mkc.cli.lookup import registered_models
from mkc.cli.reduced import Lower
from mkc.cli.reduced import SmallPlan
from mkc.cli.reduced import SmallPlans
from mkc.cli.reduced import small_plans
from mkc.cli.speculation import registered_drafters
from mkc.driver import CompileResult
from mkc.errors import MkcError
from mkc.ir.graph import Graph
from mkc.ir.types import DType
from mkc.model import Drafter
from mkc.model import Model
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.kernel_rounds import launch_rounds
from mkc.schedule.program import Program

type SmallLower = Callable[[Path | None, Path | None], Lower]
"""From the configs of model and drafter."""

LARGEST_BYTES = 256 << 20  # weights that are interpreted in about a minute
CLOCK_ENTRIES = 512  # so that waiting for one copy does not hide races of others
WEIGHT_SCALE = 0.02
SCALE_BYTE = 120  # 2^-7, which makes numbers of about this scale of 4-bit ones


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Configs of the smaller model and its drafter, None where mkc chooses.

    Attributes:
      scheme: name of the drafter, None without one.
    """

    config: Path | None
    draft: Path | None
    scheme: str | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """`ran`: without races; None when it was not run."""

    ran: bool | None
    ground: str


def find_races(model: str, result: CompileResult, lower: SmallLower, *, reduced: Reduced) -> Found:
    """Runs the model itself when it is small, else one of the same structure.

    Args:
      model: as the user named it.
      result: the plan that was asked for.
      lower: lowers the model with the same options and other configs.
      reduced: of the smaller one.
    """
    program = result.lowered.program
    if reduced.config is None and _weight_bytes(result.graph) <= LARGEST_BYTES:
        whole = SmallPlan(graph=result.graph, lowered=result.lowered, source=result.kernel_source)
        return _run_all([whole], "the model itself")
    config = reduced.config or _small_config(registered_models().get(model))
    draft = reduced.draft
    if draft is None and reduced.scheme is not None:
        draft = _small_config(registered_drafters().get(reduced.scheme))
    if config is None or (draft is None and reduced.scheme is not None):
        wanted = "--races-config" if config is None else "--races-draft"
        ground = f"too large to be interpreted; name a small config with {wanted}"
        return Found(ran=None, ground=ground)
    what = " and ".join(one.name for one in (config, draft) if one is not None)
    try:
        small = small_plans(program, result.target, lower(config, draft))
    except MkcError as error:
        if reduced.config is not None or reduced.draft is not None:
            raise
        return Found(ran=None, ground=f"the reduced size, {what}, does not compile ({error})")
    if _weight_bytes(small.plans[0].graph) > LARGEST_BYTES:
        return Found(ran=None, ground=f"{what} is still too large to be interpreted")
    return _run_all(small.plans, f"reduced to {what}{_difference(program, small)}")


def _difference(program: Program, small: SmallPlans) -> str:
    """In what the mesh and the exchanges are others than those of the large plan."""
    told = []
    if small.mesh.ranks != program.ranks:
        told.append(f" on {small.mesh} in place of {program.ranks} devices")
    if small.missing:
        told.append(f" without exchanges {', '.join(small.missing)}")
    return ",".join(told)


def _small_config(family: Model | Drafter | None) -> Path | None:
    """What a family of models that mkc ships names as its small config."""
    if family is None or not family.small_config:
        return None
    return package_folder() / family.small_config


def _weight_bytes(graph: Graph) -> int:
    return sum(one.type.bytes * one.instances for one in graph.params.values())


def _run_all(plans: Sequence[SmallPlan], what: str) -> Found:
    """Until one has a race."""
    for plan in plans:
        found = _run(plan, what)
        if not found.ran:
            return found
    ranks, several = plans[0].lowered.program.ranks, len(plans) > 1
    told = f"{what}, interpreted on {ranks} virtual devices"
    if several:
        told += f", {len(plans)} plans with different exchanges"
    return Found(ran=True, ground=told)


def _run(plan: SmallPlan, what: str) -> Found:
    """One launch with random weights, copies as late as possible, fresh memory NaN."""
    interpret = pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=CLOCK_ENTRIES,
        on_race="warn",
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    session = KernelSession(
        lowered=plan.lowered,
        source=plan.source,
        mesh=mesh_of(jax.devices("cpu")[: plan.lowered.program.ranks]),
        interpret=interpret,
    )
    session.load_weights(_weights(plan.graph))
    session.clear_states()
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            _launch(session)
        detector = interpret_pallas_call.races
        races = detector is not None and detector.races_found
        spoiled = _not_numbers(session)
    except Exception as error:  # a read out of bounds, a wait that does not end
        return Found(ran=False, ground=f"{what}: {type(error).__name__}: {error}".splitlines()[0])
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    if races or printed.getvalue():
        lines = printed.getvalue().strip().splitlines() or ["the race detector found a race"]
        return Found(ran=False, ground=f"{what}: {lines[0]}")
    if spoiled:
        problem = f"memory that nobody has written ends up in {', '.join(spoiled)} as NaN"
        return Found(ran=False, ground=f"{what}: {problem}")
    return Found(ran=True, ground=what)


def _not_numbers(session: KernelSession) -> list[str]:
    """States with a NaN. Weights and states were numbers, so it comes from fresh memory, also where
    it was multiplied by zero."""
    states = [one.name for one in session.program.operands if one.updated]
    return [
        name
        for name in states
        if any(np.isnan(part.astype(np.float32)).any() for part in session.rank_parts(name))
    ]


def _launch(session: KernelSession) -> None:
    """One step, or two steps or rounds where a launch may run several."""
    program = session.program
    rounds = [min(2, program.rounds_per_launch)] * program.batch
    tokens = np.arange(program.rows, dtype=np.int32)
    if program.round is not None:
        size = program.round.rows_per_sequence
        carried = {
            "tokens": tokens,
            "positions": np.tile(np.arange(size, dtype=np.int32), program.batch),
            "kept": np.zeros(program.batch, np.int32),
        }
        budgets = [program.context] * program.batch
        launch_rounds(session, carried, rounds=rounds, budgets=budgets)
    elif program.rounds_per_launch == 1:
        session.step(tokens, np.zeros(program.batch, np.int32))
    else:
        session.launch(tokens, np.zeros(program.batch, np.int32), rounds=rounds)


def _weights(graph: Graph) -> Callable[[str], NDArray[Any]]:
    """Small random numbers for every tensor of a checkpoint."""
    types = {
        name: param.tensor_type for param in graph.params.values() for name in param.tensor_names()
    }

    def load(name: str) -> NDArray[Any]:
        shape, dtype = types[name].shape, types[name].dtype
        random = np.random.default_rng(crc32(name.encode()))
        if dtype is DType.E2M1X2:
            return random.integers(0, 256, shape, np.uint8)
        if dtype is DType.E8M0:
            return np.full(shape, SCALE_BYTE, np.uint8)
        values = random.standard_normal(prod(shape), dtype=np.float32) * WEIGHT_SCALE
        return values.reshape(shape)

    return load
