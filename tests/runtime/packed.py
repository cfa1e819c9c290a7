"""What the tests of packed folders look at."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from mkc.passes.pipeline import Lowered
from mkc.runtime.container import load_packed
from mkc.runtime.layout import WEIGHT_ROLES
from mkc.runtime.pack import Packer
from tests.runtime.checkpoints import Weights


def check_operands(
    folder: Path, plan: Lowered, stored: Weights, drafter: Sequence[str] = ()
) -> None:
    """Every operand of every rank has the bytes that packing in memory gives."""
    packed = load_packed(folder, plan, drafter)
    packer = Packer(
        program=plan.program, sharded=plan.steps.sharded, load=lambda name: stored[name]
    )
    roles = {one.name: one.role for one in plan.program.operands}
    assert set(packed.operands) == {name for name, role in roles.items() if role in WEIGHT_ROLES}
    for name in packed.operands:
        parts = packed.operand(name)
        assert len(parts) == (1 if roles[name] == "table" else plan.program.ranks)
        for rank, part in enumerate(parts):
            operand = packer.operand(name, rank)
            assert (part.dtype, part.shape) == (operand.dtype, operand.shape)
            assert part.tobytes() == operand.tobytes(), f"{name}, rank {rank}"


def digests(folder: Path) -> dict[str, str]:
    """Every file and its contents."""
    return {one.name: sha256(one.read_bytes()).hexdigest() for one in sorted(folder.iterdir())}
