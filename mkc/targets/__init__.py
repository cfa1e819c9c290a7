"""TPU generations as data: one TOML file each, and their loader.

`load_target("tpu7x:2x2x1")` gives plain numbers (`target.vmem.usable_bytes`); where each comes from
is in `target.origins["vmem.usable_bytes"]`. Nothing else in mkc names a chip.
"""

from __future__ import annotations

from mkc.targets.loader import known_targets
from mkc.targets.loader import load_target
from mkc.targets.model import Core
from mkc.targets.model import Dma
from mkc.targets.model import Exchange
from mkc.targets.model import Hbm
from mkc.targets.model import Launch
from mkc.targets.model import Links
from mkc.targets.model import Mxu
from mkc.targets.model import Origin
from mkc.targets.model import OriginKind
from mkc.targets.model import Smem
from mkc.targets.model import Target
from mkc.targets.model import Topology
from mkc.targets.model import Vmem

__all__ = [
    "Core",
    "Dma",
    "Exchange",
    "Hbm",
    "Launch",
    "Links",
    "Mxu",
    "Origin",
    "OriginKind",
    "Smem",
    "Target",
    "Topology",
    "Vmem",
    "known_targets",
    "load_target",
]
