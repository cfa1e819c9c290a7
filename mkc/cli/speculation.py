"""From `--spec` and `--draft` to a backend that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated
from typing import Any

import typer

from mkc.cli.lookup import CONFIG_NAME
from mkc.cli.lookup import PACKAGE
from mkc.cli.lookup import naming
from mkc.cli.lookup import registered_models
from mkc.errors import NoDraftsError
from mkc.errors import SchemeOptionError
from mkc.model import Drafter
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.checkpoint import Checkpoint
from mkc.spec import block_round

REGISTERED = "DRAFTER"
NONE = "none"
REFERENCE = "reference"

SpecOption = Annotated[
    str | None, typer.Option(help="Speculative scheme: none, or the name of a drafter.")
]
DraftOption = Annotated[
    str | None, typer.Option(help="Checkpoint folder of the drafter, or OWNER/NAME of the hub.")
]


def registered_drafters() -> dict[str, Drafter]:
    """The drafters of the `models` package, by name."""
    found: dict[str, Drafter] = {}
    for module in iter_modules(import_module(PACKAGE).__path__):
        drafter = getattr(import_module(f"{PACKAGE}.{module.name}"), REGISTERED, None)
        if isinstance(drafter, Drafter):
            found[drafter.name] = drafter
    return found


def wanted_drafter(
    spec: str | None, draft: str | None, *, backend: str, distributed: bool = False
) -> Drafter | None:
    """The drafter that the options name; None for decoding without one.

    Args:
      distributed: several processes run the model.

    Raises:
      SchemeOptionError: there is no such scheme, or its checkpoint is not named.
      NoDraftsError: what is to run the model has no drafts.
    """
    if spec is None and draft is None:
        return None
    drafters = registered_drafters()
    if spec is None or (spec == NONE and draft is not None):
        raise SchemeOptionError(
            problem="--draft without a scheme that drafts", known=[NONE, *drafters]
        )
    if spec == NONE:
        return None
    if spec not in drafters:
        raise SchemeOptionError(problem=f"unknown scheme '{spec}'", known=[NONE, *drafters])
    if draft is None:
        raise SchemeOptionError(
            problem=f"--spec {spec} without --draft, the drafter's checkpoint",
            known=[NONE, *drafters],
        )
    if backend != REFERENCE:
        raise NoDraftsError(
            what=f"the kernel, which --backend {backend} runs,",
            hint=f"Choose --backend {REFERENCE}, or --spec {NONE}",
        )
    if distributed:
        raise NoDraftsError(what="--distributed", hint=f"Leave it out, or choose --spec {NONE}")
    return drafters[spec]


def refuse_in_kernel(spec: str | None) -> None:
    """For what makes a kernel, which decodes without drafts.

    Raises:
      SchemeOptionError: there is no such scheme.
      NoDraftsError: it drafts.
    """
    if spec is None or spec == NONE:
        return
    drafters = registered_drafters()
    if spec not in drafters:
        raise SchemeOptionError(problem=f"unknown scheme '{spec}'", known=[NONE, *drafters])
    raise NoDraftsError(what="the kernel", hint=f"Compile with --spec {NONE}")


def open_drafting(
    drafter: Drafter,
    draft: str,
    model: str,
    target: Checkpoint,
    *,
    slots: int,
    context: int,
    rounds_per_launch: int,
) -> OpenedBackend:
    """Opens the drafter's checkpoint, and both of them as one backend.

    Args:
      model: a registered name.

    Raises:
      MkcError: something of them is missing or does not fit.
    """
    models = registered_models()
    if model not in models:
        raise SchemeOptionError(
            problem=f"--spec {drafter.name} with model '{model}', which no file registers",
            known=[NONE, *registered_drafters()],
        )
    checkpoint = Checkpoint.open(draft)
    draft_config: Mapping[str, Any] = checkpoint.config
    with naming(Path(checkpoint.folder) / CONFIG_NAME):
        drafter.load_config(draft_config)
    scheme = block_round(
        models[model], target.config, drafter, draft_config, batch=slots, context=context
    )
    return open_speculative(scheme, target, checkpoint, rounds_per_launch=rounds_per_launch)
