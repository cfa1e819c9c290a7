"""Random numbers inside a kernel are those of the reference."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas.support import random
from mkc.ir import counter_random
from mkc.ir.counter_random import ACCEPT
from mkc.ir.counter_random import CHOICE
from mkc.ir.counter_random import DRAFT
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

SEEDS = [(0, 0), (7, -3), (-1, -1), (2**31 - 1, -(2**31))]
SHAPE = (64, 128)


@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, CHOICE])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_is_that_of_the_reference(seed: tuple[int, int], stream: int) -> None:
    """Uniform numbers bit for bit, exponential ones up to the logarithm of the machine."""
    index = np.random.default_rng(stream).integers(0, 1 << 24, SHAPE).astype(np.int32)
    position = np.int32(70_000)

    def body(seed: Any, index: Any, first: Any, second: Any) -> None:
        words = (seed[0], seed[1])
        first[...] = random.uniform(words, position, stream, index[...])
        second[...] = random.exponential(words, position, stream, index[...])

    words = np.array(seed, np.int32)
    uniform, exponential = run(
        body,
        operands=[(words, SMEM), (index, VMEM)],
        results=[(SHAPE, jnp.float32, VMEM)] * 2,
        mode=Mode.GENERIC,
    )
    wanted = np.asarray(counter_random.uniform(words, position, stream, index))
    np.testing.assert_array_equal(uniform, wanted)
    wanted = np.asarray(counter_random.exponential(words, position, stream, index))
    np.testing.assert_allclose(exponential, wanted, rtol=3e-7)
    assert exponential.min() > 0
