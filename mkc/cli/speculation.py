"""From `--spec` and `--draft` to a backend that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated
from typing import Any

import typer

from mkc.cli.kernel_choice import KernelChoice
from mkc.cli.lookup import CONFIG_NAME
from mkc.cli.lookup import PACKAGE
from mkc.cli.lookup import config_file
from mkc.cli.lookup import naming
from mkc.cli.lookup import package_folder
from mkc.cli.lookup import read_config
from mkc.cli.lookup import registered_models
from mkc.errors import ConfigError
from mkc.errors import NoDraftsError
from mkc.errors import SchemeOptionError
from mkc.model import Drafter
from mkc.model import Model
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.opening_speculative import open_kernel_rounds
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.checkpoint import Checkpoint
from mkc.spec import Round
from mkc.spec import block_round

REGISTERED = "DRAFTER"
NONE = "none"
OWN_DRAFTER = "drafter"  # folder in a model's folder: the drafter that it brings

SpecOption = Annotated[
    str | None,
    typer.Option(
        help="Speculative scheme: none, or the name of a drafter; default that of --draft."
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(help="Checkpoint of the drafter: a folder, or OWNER/NAME[@REVISION] of the hub."),
]


def registered_drafters() -> dict[str, Drafter]:
    """The drafters of the `models` package, by name."""
    found: dict[str, Drafter] = {}
    for module in iter_modules(import_module(PACKAGE).__path__):
        drafter = getattr(import_module(f"{PACKAGE}.{module.name}"), REGISTERED, None)
        if isinstance(drafter, Drafter):
            found[drafter.name] = drafter
    return found


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """A registered drafter and its checkpoint, as the user or a model's folder names it."""

    name: str
    checkpoint: str


def check_scheme(spec: str | None, draft: str | None, *, distributed: bool = False) -> None:
    """Refuses what is wrong with the options, whatever the model is.

    Args:
      distributed: several processes run the model.

    Raises:
      SchemeOptionError: there is no such scheme, or a checkpoint for a scheme without drafts.
      NoDraftsError: what is to run the model has no drafts.
    """
    known = [NONE, *registered_drafters()]
    if draft is not None and spec == NONE:
        raise SchemeOptionError(problem="--draft without a scheme that drafts", known=known)
    if spec is not None and spec not in known:
        raise SchemeOptionError(problem=f"unknown scheme '{spec}'", known=known)
    if (draft is not None or spec not in (None, NONE)) and distributed:
        raise NoDraftsError(what="--distributed", hint=f"Leave it out, or choose --spec {NONE}")


def wanted_drafter(
    spec: str | None, draft: str | None, *, folder: Path, by_default: bool = True
) -> DraftChoice | None:
    """The drafter that the options name, or that a model brings; None for decoding without one.

    Args:
      folder: of the model's checkpoint.
      by_default: take the drafter in `folder` when no option says anything.

    Raises:
      SchemeOptionError: the checkpoint is not named, and the model brings none; or the scheme is
        not named, and the checkpoint is of none.
      CheckpointError: the scheme is not named, and there is no such checkpoint.
    """
    if spec is None and draft is not None:
        return DraftChoice(name=drafter_of(Checkpoint.open(draft).folder), checkpoint=draft)
    own = folder / OWN_DRAFTER
    brought = (own / CONFIG_NAME).is_file()
    if spec == NONE or (spec is None and not (brought and by_default)):
        return None
    if spec is None:
        return DraftChoice(name=drafter_of(own), checkpoint=str(own))
    if draft is None and not brought:
        raise SchemeOptionError(
            problem=f"--spec {spec} without --draft, and {folder} has no folder '{OWN_DRAFTER}'",
            known=[NONE, *registered_drafters()],
        )
    return DraftChoice(name=spec, checkpoint=draft or str(own))


def implied_scheme(spec: str | None, draft: Path | None) -> str | None:
    """`--spec`, or the scheme of what `--draft` names where that is given alone."""
    return drafter_of(draft) if spec is None and draft is not None else spec


def drafter_of(path: Path) -> str:
    """The first registered drafter that accepts a config.json, or that of a checkpoint folder.

    Raises:
      SchemeOptionError: there is none.
      ConfigFileError: it cannot be read.
    """
    drafters = registered_drafters()
    config = read_config(config_file(path))
    for name, drafter in sorted(drafters.items()):
        with suppress(ConfigError):
            drafter.load_config(config)
            return name
    raise SchemeOptionError(
        problem=f"{path} is a checkpoint of no drafter that is known", known=[NONE, *drafters]
    )


def refuse_other_kind(spec: str, file: Path, config: Mapping[str, Any]) -> None:
    """Raises `SchemeOptionError` where a config is right, but that of something else."""
    kinds: dict[str, Drafter | Model] = {
        **{f"the drafter '{name}'": one for name, one in registered_drafters().items()},
        **{f"the model '{name}'": one for name, one in registered_models().items()},
    }
    for kind, one in sorted(kinds.items()):
        with suppress(ConfigError):
            one.load_config(config)
            raise SchemeOptionError(
                problem=f"--spec {spec} does not fit {file}, which is of {kind}",
                known=[NONE, *registered_drafters()],
            )


def scheme_round(
    model: str,
    spec: str,
    draft: Path | None,
    *,
    batch: int,
    context: int,
    config_path: Path | None,
) -> Round:
    """The round of a registered model and a drafter, with masks of tokens: it can be served.

    Args:
      spec: name of the drafter.
      draft: the drafter's config.json or checkpoint folder; None takes its default config.
      config_path: of the model, as for `model_graph`.

    Raises:
      SchemeOptionError: there is no such drafter, or the model is not a registered one.
      MkcError: they build no graph together.
    """
    models, drafters = registered_models(), registered_drafters()
    known = [NONE, *drafters]
    if spec not in drafters:
        raise SchemeOptionError(problem=f"unknown scheme '{spec}'", known=known)
    if model not in models:
        raise SchemeOptionError(
            problem=f"--spec {spec} with model '{model}', which no file registers", known=known
        )
    drafter = drafters[spec]
    file = config_file(config_path or package_folder() / models[model].default_config)
    draft_file = config_file(draft or package_folder() / drafter.default_config)
    config, draft_config = read_config(file), read_config(draft_file)
    with naming(draft_file):
        try:
            drafter.load_config(draft_config)
        except ConfigError:
            refuse_other_kind(spec, draft_file, draft_config)
            raise
    with naming(file):
        found = block_round(
            models[model],
            config,
            drafter,
            draft_config,
            batch=batch,
            context=context,
        )
        return found.masked


def open_drafting(
    draft: DraftChoice,
    model: str,
    target: Checkpoint,
    *,
    slots: int,
    context: int,
    rounds_per_launch: int,
    kernel: KernelChoice | None = None,
) -> OpenedBackend:
    """Opens the drafter's checkpoint, and both of them as one backend.

    Args:
      model: a registered name.
      kernel: what runs them; None for the reference backend.

    Raises:
      MkcError: something of them is missing or does not fit.
    """
    checkpoint = Checkpoint.open(draft.checkpoint)
    scheme = scheme_round(
        model,
        draft.name,
        checkpoint.folder,
        batch=slots,
        context=context,
        config_path=target.folder,
    )
    if kernel is None:
        return open_speculative(scheme, target, checkpoint, rounds_per_launch=rounds_per_launch)
    hardware, tp = kernel.place(scheme.graph)
    return open_kernel_rounds(
        kernel.name,
        scheme,
        target,
        checkpoint,
        hardware=hardware,
        tp=tp,
        rounds_per_launch=rounds_per_launch,
        packed=kernel.packed,
        say=kernel.say,
    )
