"""Simulates published kernels and prints the predicted times beside the published ones.

    .venv/bin/python -m bench.calibration.calibrate

One set of constants is used for all: those of `mkc/targets/tpu7x.toml`. Times marked `fit` were
used to find the constants; the others test them. The floor is the bytes at the sustained rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from bench.calibration.kernels import program
from bench.calibration.measurements import FITTED
from bench.calibration.measurements import UNMATCHED
from bench.calibration.measurements import Measurement
from bench.calibration.measurements import measurements
from mkc.schedule.simulate.engine import run
from mkc.targets import Target
from mkc.targets import load_target

TARGET = "tpu7x:2x2x1"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published time and what the simulator predicts for it."""

    measurement: Measurement
    predicted_us: float
    floor_us: float

    @property
    def error(self) -> float:
        """Predicted minus published, in parts of the published time."""
        return self.predicted_us / self.measurement.us - 1.0

    @property
    def fitted(self) -> bool:
        return self.measurement.id in FITTED


def compare(measurement: Measurement, target: Target) -> Comparison:
    """Simulates one kernel."""
    kernel = measurement.kernel
    result = run(program(kernel, target), target)
    us = max(result.end_us) - result.round_starts[0][0] * kernel.filled
    launch_us = target.launch.fixed_us if measurement.launch else 0.0
    moved = kernel.bytes if kernel.copies and not kernel.stub_bytes else 0
    return Comparison(
        measurement=measurement,
        predicted_us=us / measurement.per + launch_us,
        floor_us=moved / target.hbm.sustained_bytes_per_us / measurement.per,
    )


def mean_absolute_error(comparisons: list[Comparison]) -> float:
    """In parts of the published times."""
    return fmean(abs(one.error) for one in comparisons)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Errors of several times in %: how many, their mean absolute error, and the worst."""

    times: int
    mean: float
    worst: float


# Rows of the table: those of few times are taken together.
ROWS = ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8 to C10", "all", "not fitted")
TOGETHER = {"C8": "C8 to C10", "C9": "C8 to C10", "C10": "C8 to C10"}


def series(comparisons: list[Comparison]) -> dict[str, Series]:
    """The rows of the table in docs/simulation.md."""
    rows: dict[str, list[float]] = {row: [] for row in ROWS}
    for one in comparisons:
        name = one.measurement.id.split()[0]
        for row in (TOGETHER.get(name, name), "all", *(() if one.fitted else ("not fitted",))):
            rows[row].append(100 * one.error)
    return {
        row: Series(
            times=len(errors),
            mean=round(fmean(map(abs, errors)), 1),
            worst=round(max(errors, key=abs), 1),
        )
        for row, errors in rows.items()
    }


def main() -> None:
    """Prints the table."""
    target = load_target(TARGET)
    found = [compare(one, target) for one in measurements()]
    print(f"| {'kernel':44} | published us | predicted us | floor us | error % | |")
    print(f"|{'-' * 46}|---|---|---|---|---|")
    for one in found:
        name, us = one.measurement.id, one.measurement.us
        print(
            f"| {name:44} | {us:9.2f} | {one.predicted_us:9.2f} | {one.floor_us:8.2f} "
            f"| {100 * one.error:+6.1f} | {'fit' if one.fitted else ''} |"
        )
    print("\n| series | times | mean absolute error % | worst % |\n|---|---|---|---|")
    for row, errors in series(found).items():
        print(f"| {row} | {errors.times} | {errors.mean:.1f} | {errors.worst:+.1f} |")
    print()
    print("Not compared:\n")
    for other in UNMATCHED:
        print(f"* {other.id} ({other.us} us): {other.reason}.")


if __name__ == "__main__":
    main()
