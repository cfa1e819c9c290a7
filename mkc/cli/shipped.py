"""The checkpoints that come with mkc, by the names that commands know them by."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mkc.cli.lookup import PACKAGE

DEFAULT_CHECKPOINT = "tiny"
# Name to folder of the models package.
SHIPPED = {DEFAULT_CHECKPOINT: "tiny", "kimi-tiny": "kimi_tiny"}


def checkpoint_named(weights: str | None) -> str:
    """What to open for what the user named: a shipped checkpoint's folder, or the same text.

    A folder of the user goes before a shipped checkpoint of the same name.

    Args:
      weights: None for the default.
    """
    name = DEFAULT_CHECKPOINT if weights is None else weights
    if name not in SHIPPED or (weights is not None and Path(weights).is_dir()):
        return name
    return str(Path(import_module(PACKAGE).__path__[0], SHIPPED[name]))
