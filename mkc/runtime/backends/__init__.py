"""What runs a model: the kernel on TPUs, the kernel interpreted, or the graph itself."""

from __future__ import annotations

from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.opening import open_kernel
from mkc.runtime.backends.opening import open_reference
from mkc.runtime.backends.reference import ReferenceBackend

__all__ = [
    "Backend",
    "BackendName",
    "KernelBackend",
    "OpenedBackend",
    "ReferenceBackend",
    "Snapshot",
    "StepResult",
    "open_kernel",
    "open_reference",
]
