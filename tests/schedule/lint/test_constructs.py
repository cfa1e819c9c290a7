"""The lint of traced kernels beside the TPU compiler, construct by construct."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from mkc.codegen_pallas.aot import child_environment
from mkc.runtime.kernel import mesh_of
from mkc.schedule.lint import LINTS
from mkc.schedule.lint import lint_traced
from mkc.schedule.verify.trace import pallas_kernel
from tests.schedule.lint.constructs import CONSTRUCTS
from tests.schedule.lint.constructs import TRACED
from tests.schedule.lint.constructs import Construct

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGY = "tpu7x:2x2x1"


@functools.cache
def refusals() -> dict[str, str | None]:
    """What the compiler says against every construct; one process for all."""
    with TemporaryDirectory() as dump:
        child = subprocess.run(
            [sys.executable, "-m", "tests.schedule.lint.constructs", TOPOLOGY],
            cwd=ROOT,
            env=child_environment(dump),
            capture_output=True,
            timeout=300,
            check=False,
        )
    assert child.returncode == 0, child.stderr.decode(errors="replace")[-4000:]
    lines = [json.loads(one) for one in child.stdout.decode().splitlines() if one[:1] == "{"]
    return {one["name"]: one["error"] for one in lines}


def traced_codes(construct: Construct) -> set[str]:
    everywhere = PartitionSpec()
    launch = jax.shard_map(
        construct.call(pltpu.InterpretParams()),
        mesh=jax.sharding.Mesh(mesh_of(jax.devices("cpu")[:1]).devices, ("x",)),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    kernel = pallas_kernel(jax.make_jaxpr(launch)(*construct.arguments()))
    return {one.code for one in lint_traced(kernel, [])}


@pytest.mark.parametrize("construct", CONSTRUCTS, ids=lambda one: one.name)
def test_the_compiler(construct: Construct) -> None:
    """What a rule says of the compiler is so, or the rule is about what chips did."""
    error = refusals()[construct.name]
    assert (error is not None) == construct.refused, error


@pytest.mark.parametrize(
    "construct", [one for one in CONSTRUCTS if one.lint == TRACED], ids=lambda one: one.name
)
def test_the_lint(construct: Construct) -> None:
    """Nothing that the compiler refuses passes; nothing else is named without a rule."""
    assert traced_codes(construct) == ({construct.rule} if construct.rule else set())


def test_what_is_refused_has_a_rule() -> None:
    assert {one.rule for one in CONSTRUCTS if one.refused} <= LINTS.keys()
