"""Drafters of another target, options that name none, and what has no drafts."""

from __future__ import annotations

import pytest

from mkc.cli.speculation import refuse_in_kernel
from mkc.cli.speculation import wanted_drafter
from mkc.errors import DraftMismatchError
from mkc.errors import NoDraftsError
from mkc.errors import SchemeOptionError
from tests.draft_goldens import golden_round
from tests.errors.command import Command
from tests.errors.expect import refused


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
        "dflash2, none",
        argv="run -p hello --weights model --spec eagle --draft drafter",
    )


def test_a_scheme_without_its_checkpoint() -> None:
    with refused(SchemeOptionError, "--spec dflash2 without --draft", "expected --spec NAME"):
        wanted_drafter("dflash2", None, backend="reference")
    with refused(SchemeOptionError, "--draft without a scheme", "expected --spec NAME"):
        wanted_drafter(None, "drafter", backend="reference")


@pytest.mark.parametrize("backend", ["tpu", "interpret"])
def test_a_backend_that_runs_no_drafts(command: Command, backend: str) -> None:
    command.refused(
        NoDraftsError,
        f"--backend {backend} runs, has no drafts yet",
        "--backend reference",
        argv=f"run -p hello --spec dflash2 --draft drafter --backend {backend}",
    )


def test_several_processes_run_no_drafts(command: Command) -> None:
    command.refused(
        NoDraftsError,
        "--distributed has no drafts yet",
        "in one process",
        argv="chat --spec dflash2 --draft drafter --distributed",
    )


def test_kernels_have_no_drafts(command: Command) -> None:
    """Neither a kernel nor its weights are made as if they had."""
    command.refused(
        NoDraftsError,
        "the kernel has no drafts yet",
        "Compile with --spec none",
        argv="compile qwen38 --spec dflash2 --no-aot",
    )
    command.refused(
        NoDraftsError,
        "the kernel has no drafts yet",
        "Pack without --draft",
        argv="pack qwen38 --weights model --draft drafter --out packed",
    )
    command.refused(SchemeOptionError, "unknown scheme 'eagle'", argv="compile qwen38 --spec eagle")
    refuse_in_kernel("none")
    refuse_in_kernel(None)


def test_no_drafter_is_wanted() -> None:
    assert wanted_drafter(None, None, backend="tpu") is None
    assert wanted_drafter("none", None, backend="tpu") is None
