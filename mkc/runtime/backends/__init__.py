"""What runs a model: the kernel on TPUs, the kernel interpreted, or the graph itself."""

from __future__ import annotations

from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import DraftingBackend
from mkc.runtime.backends.backend import Launch
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.backends.kernel_rounds import KernelRoundsBackend
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.opening import open_kernel
from mkc.runtime.backends.opening import open_reference
from mkc.runtime.backends.opening_speculative import open_kernel_rounds
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.backends.speculative import SpeculativeBackend

__all__ = [
    "Backend",
    "BackendName",
    "DraftingBackend",
    "KernelBackend",
    "KernelRoundsBackend",
    "Launch",
    "OpenedBackend",
    "ReferenceBackend",
    "Snapshot",
    "SpeculativeBackend",
    "StepResult",
    "open_kernel",
    "open_kernel_rounds",
    "open_reference",
    "open_speculative",
]
