"""Modules that prepare the process for JAX do not import it.

JAX takes its platform and the number of its virtual devices from the environment when it is first
imported; a module that imports it on the way makes `mkc verify` fail with too few devices.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

EARLY = ("mkc", "mkc.targets", "mkc.cli.main", "mkc.cli.verify", "mkc.codegen_pallas.aot")


def imports_jax(statement: str) -> bool:
    """Whether JAX is there when a fresh interpreter has executed the statement."""
    program = f"import sys\n{statement}\nprint('jax' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    return shown.stdout.split()[-1] == "True"


@pytest.mark.parametrize("module", EARLY)
def test_jax_is_not_imported(module: str) -> None:
    assert not imports_jax(f"import {module}")


def test_an_import_of_jax_is_noticed() -> None:
    assert imports_jax("import jax")
