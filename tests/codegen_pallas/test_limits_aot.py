"""Limits in the target files are those of the real compiler: it takes as much, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkc.codegen_pallas.aot import compile_ahead
from mkc.targets import load_target

KERNEL = Path(__file__).with_name("semaphore_kernel.py")


@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v5p:2x2x1"])
def test_semaphores(name: str) -> None:
    source = KERNEL.read_text(encoding="utf-8")
    count = load_target(name).semaphores.usable_count
    errors = [
        compile_ahead(source.replace("COUNT = 1\n", f"COUNT = {one}\n"), topology=name).error or ""
        for one in (count, count + 1)
    ]
    assert "memory space sflag" not in errors[0], errors[0]
    assert "memory space sflag" in errors[1]
