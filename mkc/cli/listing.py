"""`mkc models` and `mkc targets`: what can be named on the command line."""

from __future__ import annotations

import typer

from mkc.cli.lookup import registered_models
from mkc.targets import known_targets
from mkc.targets import load_target


def models_command() -> None:
    """List the models that mkc ships."""
    for name, model in sorted(registered_models().items()):
        typer.echo(f"{name:12} default config: models/{model.default_config}")


def targets_command() -> None:
    """List the TPU generations and their topologies."""
    for name in known_targets():
        target = load_target(name)
        typer.echo(f"{name:6} {target.summary}")
        for topology in target.topologies:
            typer.echo(f"       {topology.full_name:14} {topology.devices:3} devices")
