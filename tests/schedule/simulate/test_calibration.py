"""The simulator against published times. `bench/calibration` tells where they come from."""

from __future__ import annotations

from bench.calibration.calibrate import mean_absolute_error
from bench.calibration.measurements import FITTED
from bench.calibration.measurements import UNMATCHED
from bench.calibration.measurements import measurements
from tests.schedule.simulate.calibrated import comparisons

FEWEST = 10
MEAN_ERROR = 0.08  # the bounds that were set before the simulator was written
LARGEST_ERROR = 0.15


def test_the_mean_error_is_small() -> None:
    found = list(comparisons())
    assert len(found) >= FEWEST
    assert mean_absolute_error(found) <= MEAN_ERROR


def test_no_measurement_is_far_off() -> None:
    far = {one.measurement.id: one.error for one in comparisons() if abs(one.error) > LARGEST_ERROR}
    assert far == {}


def test_times_that_were_not_fitted_are_as_good() -> None:
    tested = [one for one in comparisons() if not one.fitted]
    assert len(tested) >= FEWEST
    assert mean_absolute_error(tested) <= MEAN_ERROR


def test_every_series_has_a_time_that_was_not_fitted() -> None:
    series = {one.measurement.id.split()[0] for one in comparisons()}
    tested = {one.measurement.id.split()[0] for one in comparisons() if not one.fitted}
    assert series == {"C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10"}
    assert series - tested == {"C3"}  # the one series that the matrix unit's constants come from


def test_names_are_unique_and_fitted_ones_exist() -> None:
    names = [one.id for one in measurements()]
    assert len(set(names)) == len(names)
    assert set(names) >= FITTED


def test_what_is_not_compared_has_a_reason() -> None:
    assert all(len(one.reason) > 20 for one in UNMATCHED)


def test_predictions_are_above_their_floor() -> None:
    """But for kernels whose ring is full when the clock starts."""
    for one in comparisons():
        if not one.measurement.kernel.filled:
            assert one.predicted_us >= one.floor_us, one.measurement.id
