"""Published kernels and what the simulator says of them, simulated once for all tests."""

from __future__ import annotations

from functools import cache

from bench.calibration.calibrate import TARGET
from bench.calibration.calibrate import Comparison
from bench.calibration.calibrate import compare
from bench.calibration.measurements import measurements
from mkc.targets import load_target


@cache
def comparisons() -> tuple[Comparison, ...]:
    target = load_target(TARGET)
    return tuple(compare(one, target) for one in measurements())
