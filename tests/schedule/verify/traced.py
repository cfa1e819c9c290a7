"""Traces real generated kernels, for the comparison with what the verifier says they do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.source import kernel_source
from mkc.passes.pipeline import Lowered
from mkc.runtime.kernel import mesh_of
from mkc.schedule.verify.trace import pallas_kernel
from mkc.targets import load_target


def module_of(lowered: Lowered) -> ModuleType:
    """The generated kernel as a module."""
    source = kernel_source(lowered.program, lowered.steps, target=load_target("tpu7x"))
    module = ModuleType("traced_kernel")
    sys.modules[module.__name__] = module  # annotations of its classes are looked up there
    exec(compile(source, "kernel.py", "exec"), module.__dict__)
    return module


def trace(module: ModuleType) -> Any:
    """The traced kernel."""
    mesh = mesh_of(jax.devices()[: module.RANKS])
    step = module.build(mesh, pltpu.InterpretParams())
    return pallas_kernel(jax.make_jaxpr(step)(*module.abstract_arguments(mesh)))
