"""Prediction: an event simulation of all ranks' programs. `docs/simulation.md` tells the model.

from mkc.schedule.simulate import simulate

found = simulate(lowered.program, target)
found.prediction.round_us  # predicted
found.events, found.path   # for tables, traces and pictures
"""

from __future__ import annotations

from mkc.schedule.simulate.analysis import Exposed
from mkc.schedule.simulate.analysis import Part
from mkc.schedule.simulate.analysis import PathStep
from mkc.schedule.simulate.analysis import PhaseTime
from mkc.schedule.simulate.analysis import Window
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.bundles import bundle_costs
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import MEMORY
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import RankSkew
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.prediction import Prediction
from mkc.schedule.simulate.prediction import Simulation
from mkc.schedule.simulate.prediction import predict
from mkc.schedule.simulate.prediction import simulate

__all__ = [
    "CORE",
    "MEMORY",
    "Engine",
    "Event",
    "Exposed",
    "Kind",
    "Part",
    "PathStep",
    "PhaseCost",
    "PhaseCycles",
    "PhaseTime",
    "Prediction",
    "RankSkew",
    "Simulation",
    "Source",
    "Stall",
    "Window",
    "bundle_costs",
    "predict",
    "simulate",
]
