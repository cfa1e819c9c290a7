"""Kernels of Kimi K3 layers: delta rule with a decay of each channel, latent attention, residual
blocks, experts in bf16 and MXFP4.

Whole texts run in the interpreter of Pallas itself, several devices in the TPU interpreter at its
most hostile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkc.ir.graph import Graph
from models.kimi_k3 import MODEL
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import PROMPT
from tests.kernel.harness import KernelRun
from tests.kernel.harness import Subject
from tests.kernel.harness import check
from tests.kernel.harness import check_logits
from tests.kernel.harness import check_ranks
from tests.kernel.harness import check_states
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_config

HEADS = 8
MANY = 32  # devices of a process of its own
MANY_SECONDS = 3600  # an upper bound for a busy machine
# Two kinds of layers, and a block that is stored behind the first.
KINDS = {
    "delta": ((), 3, False),
    "latent": ((2,), 3, False),
    "experts": ((), 1, False),
    "mxfp4": ((2,), 1, True),
}


@cache
def subject_of(kind: str) -> Subject:
    """Two layers; of some kinds the second has experts, or latent attention."""
    latent, dense, mxfp4 = KINDS[kind]
    return _subject(kind, latent=latent, dense=dense, mxfp4=mxfp4)


def _subject(name: str, *, latent: Iterable[int], dense: int, mxfp4: bool) -> Subject:
    config = small_config(layers=2, latent=latent, dense=dense, mxfp4=mxfp4)
    config["text_config"] |= {"vocab_size": 512, "attn_res_block_size": 1}  # two blocks
    return traced(name, config, heads=HEADS)


def traced(name: str, config: Mapping[str, Any], *, heads: int) -> Subject:
    """A config's graph, with weights."""

    def trace(batch: int) -> Graph:
        return MODEL.trace(config, batch=batch, context=128)

    return Subject(
        name=name,
        trace=trace,
        weights=kimi_weights(trace(1), 1, heads=heads),
        prompt=(np.arange(PROMPT, dtype=np.int32) * 37 + 11) % 500,
    )


@pytest.mark.parametrize(("kind", "batch"), [("latent", 1), ("mxfp4", 3)])
def test_one_device(kind: str, batch: int) -> None:
    """From the middle of a text, over a border of rows and one of tiles."""
    subject = subject_of(kind)
    session = session_of(
        subject, ranks=1, batch=batch, mode=Mode.GENERIC, passes="residency{cache_tile=32}"
    )
    reference = reference_of(subject)
    check(run_kernel(session, reference, (31, 15, 63)[:batch], 2), reference)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("delta", 2),
        ("mxfp4", 2),
        ("experts", 4),
        pytest.param("mxfp4", 4, marks=pytest.mark.long),
        pytest.param("mxfp4", 8, marks=pytest.mark.long),
    ],
)
def test_several_devices(kind: str, ranks: int) -> None:
    check_step(subject_of(kind), ranks)


def check_step(subject: Subject, ranks: int) -> KernelRun:
    """Copies land late, memory is NaN until it is written, races are found.

    Tokens are left to `test_one_device`: one step may well have no clear winner.
    """
    session = session_of(subject, ranks=ranks, batch=1, mode=Mode.LATE)
    reference = reference_of(subject)
    run = run_kernel(session, reference, (47,), 1)
    assert not run.races, "the race detector found a race"
    assert run.printed == "", "a copy is still under way or a semaphore is left over"
    for part in (check_logits, check_states):
        part(run, reference)
    check_ranks(run)
    return run


@pytest.mark.long
def test_many_devices() -> None:
    """Experts in groups of ranks, sums in two steps: a process of its own has so many devices."""
    flags = f"--xla_allow_excess_precision=false --xla_force_host_platform_device_count={MANY}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernel.many_devices_program"],
        env=os.environ | {"XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=MANY_SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == f"{MANY} ranks agree"
