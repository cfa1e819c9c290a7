"""Runs a plan at reduced size in interpret mode, with late copies and the race detector."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

from mkc.cli.lookup import config_file
from mkc.cli.lookup import package_folder
from mkc.cli.lookup import read_config
from mkc.cli.lookup import registered_models
from mkc.driver import CompileResult
from mkc.errors import MkcError
from mkc.ir.graph import Graph
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.kernel_rounds import launch_rounds

type Compile = Callable[[Path | None, Path | None], CompileResult]
"""From the configs of model and drafter."""

LARGEST_BYTES = 256 << 20  # weights that are interpreted in about a minute
CLOCK_ENTRIES = 512  # so that waiting for one copy does not hide races of others
WEIGHT_SCALE = 0.02
# Sizes that checkpoints give under common names, and what they become.
SMALLER = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Configs of the smaller model and its drafter, None where mkc chooses.

    Attributes:
      drafts: there is a drafter.
    """

    config: Path | None
    draft: Path | None
    drafts: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """`ran`: without races; None when it was not run."""

    ran: bool | None
    ground: str


def find_races(
    model: str,
    result: CompileResult,
    compiled: Compile,
    *,
    config: Path | None,
    reduced: Reduced,
) -> Found:
    """Runs the model itself when it is small, else one of the same structure.

    Args:
      result: the plan that was asked for.
      compiled: compiles the model with the same options and other configs.
      config: of the model, as the user gave it.
      reduced: of the smaller one.
    """
    if reduced.config is None and _weight_bytes(result.graph) <= LARGEST_BYTES:
        return _run(result, "the model itself")
    if reduced.config is not None:
        what = f"reduced to {reduced.config.name}"
        return _run_small(compiled(reduced.config, reduced.draft), what)
    if reduced.drafts:
        ground = (
            "too large to be interpreted; name small configs with --races-config, --races-draft"
        )
        return Found(ran=None, ground=ground)
    if model not in registered_models():
        ground = "too large to be interpreted; name a small config with --races-config"
        return Found(ran=None, ground=ground)
    file = config_file(config or package_folder() / registered_models()[model].default_config)
    small = _smaller(read_config(file))
    with TemporaryDirectory(prefix="mkc-races-") as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(small), encoding="utf-8")
        try:
            found = compiled(path, None)
        except MkcError as error:
            ground = f"the chosen size does not compile ({error}); name one with --races-config"
            return Found(ran=None, ground=ground)
    text = small.get("text_config", small)
    return _run_small(found, f"reduced to {text.get('num_hidden_layers')} layers")


def _run_small(result: CompileResult, what: str) -> Found:
    if _weight_bytes(result.graph) > LARGEST_BYTES:
        return Found(ran=None, ground=f"{what} it is still too large to be interpreted")
    return _run(result, what)


def _weight_bytes(graph: Graph) -> int:
    return sum(one.type.bytes * one.instances for one in graph.params.values())


def _smaller(config: Mapping[str, Any]) -> dict[str, Any]:
    """One period of the layers, and smaller widths where they have their common names."""
    small = dict(config)
    if isinstance(small.get("text_config"), dict):
        small["text_config"] = _smaller(small["text_config"])
        return small
    kinds = small.get("layer_types")
    if isinstance(kinds, list) and kinds:
        period = next(
            size
            for size in range(1, len(kinds) + 1)
            if all(kinds[at] == kinds[at % size] for at in range(len(kinds)))
        )
        small["layer_types"] = kinds[:period]
        small["num_hidden_layers"] = period
    elif isinstance(small.get("num_hidden_layers"), int):
        small["num_hidden_layers"] = min(2, small["num_hidden_layers"])
    for name, size in SMALLER.items():
        if isinstance(small.get(name), int):
            small[name] = min(size, small[name])
    return small


def _run(result: CompileResult, what: str) -> Found:
    """One launch with random weights, copies as late as possible, fresh memory NaN."""
    program = result.lowered.program
    interpret = pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=CLOCK_ENTRIES,
        on_race="warn",
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    session = KernelSession(
        lowered=result.lowered,
        source=result.kernel_source,
        mesh=mesh_of(jax.devices("cpu")[: program.ranks]),
        interpret=interpret,
    )
    session.load_weights(_weights(result.graph))
    session.clear_states()
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            _launch(session)
        detector = interpret_pallas_call.races
        races = detector is not None and detector.races_found
    except Exception as error:  # a read out of bounds, a wait that does not end
        return Found(ran=False, ground=f"{what}: {type(error).__name__}: {error}".splitlines()[0])
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    if races or printed.getvalue():
        ground = printed.getvalue().strip().splitlines() or ["the race detector found a race"]
        return Found(ran=False, ground=f"{what}: {ground[0]}")
    return Found(ran=True, ground=f"{what}, interpreted on {program.ranks} virtual devices")


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
    shapes = {
        name: param.tensor_type.shape
        for param in graph.params.values()
        for name in param.tensor_names()
    }

    def load(name: str) -> NDArray[Any]:
        shape = shapes[name]
        random = np.random.default_rng(crc32(name.encode()))
        values = random.standard_normal(prod(shape), dtype=np.float32) * WEIGHT_SCALE
        return values.reshape(shape)

    return load
