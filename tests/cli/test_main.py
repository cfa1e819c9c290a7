"""The list of commands, which is shown without importing them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import cleandoc

import pytest
from typer.testing import CliRunner

from mkc.cli.main import COMMANDS
from mkc.cli.main import app

HEAVY = ("jax", "numpy.random._generator", "tokenizers", "mkc.driver")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_list_is_the_first_one_of_the_command(name: str) -> None:
    place, line = COMMANDS[name]
    module, _, function = place.partition(":")
    assert cleandoc(getattr(import_module(module), function).__doc__).splitlines()[0] == line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], prog_name="mkc")
    assert result.exit_code == 0, result.output
    assert f"Usage: mkc {name}" in result.stdout


def test_the_list_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom mkc.cli.main import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        f"print(result.exit_code, [one for one in {HEAVY!r} if one in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.decode().strip() == "0 []"


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(app, ["brew"])
    assert result.exit_code == 2
    assert "brew" in result.output
