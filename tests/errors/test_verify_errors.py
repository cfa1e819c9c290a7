"""Kernel files that `mkc verify` cannot use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mkc import driver
from mkc.cli.verification import read_kernel
from mkc.driver import CompileRequest
from mkc.driver import compile_graph
from mkc.errors import KernelFileError
from mkc.errors import LintError
from mkc.errors import ProofError
from mkc.schedule.verify import prove
from mkc.targets import load_target
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lowered


def test_a_kernel_that_is_not_there(command: Command) -> None:
    model = Path(__file__).parents[1] / "cli" / "small_model.py"
    command.refused(
        KernelFileError,
        "nowhere.py",
        "cannot be read",
        "that mkc compile wrote",
        "leave out --kernel",
        argv=f"verify {model}:decoder --kernel nowhere.py",
    )


@pytest.mark.parametrize("content", [b"\xff\xfe\x00"])
def test_a_kernel_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "kernel.py"
    file.write_bytes(content)
    with refused(KernelFileError, "kernel.py", "cannot be read", "Name such a file"):
        read_kernel(file)


def test_a_plan_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled from it; the first fault is named with its code and place."""
    program = lowered("dense", 2).program
    broken = replace(program, tape=replace(program.tape, rows=program.tape.rows - 1))
    found = prove([broken] * 2, load_target(TARGET))
    monkeypatch.setattr(driver, "prove", lambda *_: found)
    request = CompileRequest(graph=dense_graph(), target=TARGET, tp=2, aot=False)
    with refused(ProofError, "'dense'", found.issues[0].code, "fault of mkc", "mkc verify"):
        compile_graph(request)


def test_a_kernel_for_interpret_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation ends before the proof and the TPU compiler; the first rule is named."""
    sound = lowered("dense", 2)
    buffers = tuple(replace(one, shape=(2, one.shape[1])) for one in sound.program.buffers)
    broken = replace(sound, program=replace(sound.program, buffers=buffers))
    monkeypatch.setattr(driver, "lower_graph", lambda *_, **__: broken)
    monkeypatch.setattr(driver, "_compile_ahead", lambda *_: pytest.fail("compiled ahead"))
    request = CompileRequest(graph=dense_graph(), target=TARGET, tp=2, aot=True)
    with refused(LintError, "'dense'", "L105", "2 rows", "mkc verify", "--passes"):
        compile_graph(request)
