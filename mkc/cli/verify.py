"""`mkc verify`: proof, lint, race detection and ahead-of-time compile of a model's kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mkc.targets import load_target

FAILED = 1  # exit status when an obligation does not hold
DEVICES = "--xla_force_host_platform_device_count"
EXACT = "--xla_allow_excess_precision=false"


def verify_command(
    model: Annotated[str, typer.Argument(help="A name of `mkc models`, or file.py:function.")],
    target: Annotated[
        str, typer.Option(help="GENERATION or GENERATION:TOPOLOGY, see `mkc targets`.")
    ] = "tpu7x:2x2x1",
    batch: Annotated[int, typer.Option(help="Independent sequences per step, 1 to 8.")] = 1,
    context: Annotated[int, typer.Option(help="Positions the caches hold.")] = 4096,
    config: Annotated[
        Path | None, typer.Option(help="config.json, or a checkpoint folder with one.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default all devices of the topology.")
    ] = None,
    passes: Annotated[str, typer.Option(help="Options of the passes, as text.")] = "",
    spec: Annotated[
        str | None, typer.Option(help="Speculative scheme: none, or the name of a drafter.")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Drafter's config.json, or a checkpoint folder with one."),
    ] = None,
    rounds_per_launch: Annotated[
        int, typer.Option(min=1, help="Decode steps, or rounds, that one launch may run.")
    ] = 1,
    logits: Annotated[bool, typer.Option(help="The kernel returns the logits too.")] = False,
    token_masks: Annotated[
        bool, typer.Option(help="The kernel reads which tokens each sequence may emit.")
    ] = False,
    kernel: Annotated[
        Path | None,
        typer.Option(
            help="Check this kernel.py, which may be edited, in place of the generated one."
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option(help="Compare the traced kernel with what was proven.")
    ] = True,
    races: Annotated[
        bool, typer.Option(help="Run the plan at reduced size under the race detector.")
    ] = True,
    races_config: Annotated[
        Path | None,
        typer.Option(help="config.json of the reduced size; default: the small one of the model."),
    ] = None,
    races_draft: Annotated[
        Path | None, typer.Option(help="Drafter's config.json for the reduced size.")
    ] = None,
    aot: Annotated[bool, typer.Option(help="Compile ahead of time with the TPU compiler.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Prove a model's kernel, and check the proof against the kernel.

    Exit status 1 when an obligation does not hold.
    """
    virtual_devices(target, tp)
    from mkc.cli.verification import Request
    from mkc.cli.verification import print_verdicts
    from mkc.cli.verification import run_verification

    request = Request(
        model=model,
        target=target,
        batch=batch,
        context=context,
        config=config,
        tp=tp,
        passes=passes,
        spec=spec,
        draft=draft,
        rounds_per_launch=rounds_per_launch,
        logits=logits,
        token_masks=token_masks,
        kernel=kernel,
        trace=trace,
        races=races,
        races_config=races_config,
        races_draft=races_draft,
        aot=aot,
    )
    verdicts = run_verification(request, quiet=json)
    print_verdicts(verdicts, as_json=json)
    if any(one.status == "fails" for one in verdicts):
        raise typer.Exit(FAILED)


def virtual_devices(target: str, tp: int | None) -> None:
    """As many CPU devices as the kernel has ranks; JAX reads this when it is first imported."""
    if "jax" in sys.modules:
        return
    found = load_target(target)
    topologies = [found.topology] if found.topology else list(found.topologies)
    count = tp or max(one.devices for one in topologies)
    flags = [one for one in os.environ.get("XLA_FLAGS", "").split() if not one.startswith(DEVICES)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{DEVICES}={count}", EXACT])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
