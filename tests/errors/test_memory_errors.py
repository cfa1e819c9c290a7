"""What does not fit: VMEM, device memory, contexts, batches."""

from __future__ import annotations

import pytest

from mkc.errors import BatchError
from mkc.errors import ContextError
from mkc.errors import HbmError
from mkc.errors import LiveBuffer
from mkc.errors import VmemError
from tests.errors.expect import refused

MIB = 1 << 20
GIB = 1 << 30


def test_vmem_message_lists_live_buffers_by_size() -> None:
    live = [
        LiveBuffer(name="hidden", op="embed", bytes=MIB),
        LiveBuffer(name="tape_ring", op="weight stream", bytes=40 * MIB),
        LiveBuffer(name="gate", op="linear", bytes=24 * MIB),
    ]
    with (
        refused(
            VmemError,
            "needs 65.00 MiB of VMEM, the limit is 60.00 MiB: 5.00 MiB too much",
            "Cheapest change: a lower --batch.",
            "40.00 MiB  tape_ring  (weight stream)\n     24.00 MiB  gate  (linear)\n",
        ),
    ):
        raise VmemError(
            needed_bytes=65 * MIB,
            limit_bytes=60 * MIB,
            live=live,
            cheapest_change="a lower --batch",
        )
