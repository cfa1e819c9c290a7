"""Drafters of another target, options that name none, and what has no drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mkc.cli.speculation import scheme_round
from mkc.cli.speculation import wanted_drafter
from mkc.errors import ConfigKeyError
from mkc.errors import DraftMismatchError
from mkc.errors import NoDraftsError
from mkc.errors import SchemeOptionError
from tests.draft_goldens import golden_round
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.runtime.checkpoints import write_checkpoint

TINY = Path(__file__).parents[2] / "models" / "tiny"


def test_a_drafter_of_another_target() -> None:
    with refused(
        DraftMismatchError,
        "drafter 'dflash2'",
        "embedding of (2048, 256)",
        "of the target is (1024, 256)",
        "Choose the drafter that was trained for this target",
    ):
        golden_round(vocab_size=2048)


def test_a_scheme_that_does_not_exist(command: Command) -> None:
    command.refused(
        SchemeOptionError,
        "unknown scheme 'eagle'",
        "--spec NAME --draft CHECKPOINT",
        "dflash2, dspark, none",
        argv="run -p hello --weights model --spec eagle --draft drafter",
    )


def test_a_scheme_without_its_checkpoint(tmp_path: Path) -> None:
    with refused(
        SchemeOptionError,
        f"--spec dflash2 without --draft, and {tmp_path} has no folder 'drafter'",
        "expected --spec NAME",
    ):
        wanted_drafter("dflash2", None, folder=tmp_path)


@pytest.mark.parametrize("command_line", ["pack qwen38 --out packed", "run -p hello"])
def test_a_checkpoint_without_a_scheme(command: Command, command_line: str) -> None:
    command.refused(
        SchemeOptionError,
        "--draft without a scheme that drafts",
        "expected --spec NAME --draft CHECKPOINT",
        argv=f"{command_line} --weights model --spec none --draft drafter",
    )


def test_a_folder_of_no_known_drafter(tmp_path: Path) -> None:
    """Brought by the model, or named without a scheme."""
    folder = write_checkpoint(tmp_path / "drafter", "qwen38_lane")
    said = f"{folder} is a checkpoint of no drafter"
    with refused(SchemeOptionError, said, "none"):
        wanted_drafter(None, None, folder=tmp_path)
    with refused(SchemeOptionError, said, "none"):
        wanted_drafter(None, str(folder), folder=tmp_path / "elsewhere")


@pytest.mark.parametrize("options", ["--spec dflash2 --draft drafter", "--draft drafter"])
def test_several_processes_run_no_drafts(command: Command, options: str) -> None:
    command.refused(
        NoDraftsError,
        "--distributed has no drafts yet",
        "in one process",
        argv=f"chat {options} --distributed",
    )


def test_a_scheme_of_another_drafter(command: Command) -> None:
    """Not a key that its config lacks: the scheme is the wrong one, or the folder."""
    for options in ("--spec dspark", f"--spec dspark --draft {TINY / 'drafter'}"):
        command.refused(
            SchemeOptionError,
            f"--spec dspark does not fit {TINY / 'drafter' / 'config.json'}",
            "which is of the drafter 'dflash2'",
            "expected --spec NAME",
            argv=f"run -p hello --weights {TINY} {options}",
        )
    command.refused(
        SchemeOptionError,
        f"--spec dflash2 does not fit {TINY / 'config.json'}, which is of the model 'qwen38'",
        argv=f"run -p hello --weights {TINY} --spec dflash2 --draft {TINY}",
    )


def test_a_config_of_a_drafter_that_lacks_a_key(tmp_path: Path) -> None:
    config = json.loads((TINY / "drafter" / "config.json").read_text(encoding="utf-8"))
    del config["hidden_size"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    with refused(ConfigKeyError, str(file), "key 'hidden_size' is missing"):
        scheme_round("qwen38", "dflash2", file, batch=1, context=64, config_path=TINY)


def test_a_scheme_of_a_model_that_no_file_registers() -> None:
    with refused(SchemeOptionError, "with model 'gpt9', which no file registers"):
        scheme_round("gpt9", "dflash2", None, batch=1, context=16, config_path=None)
