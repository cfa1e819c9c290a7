"""One model over several processes: process 0 generates, the others follow its calls."""

from __future__ import annotations

from mkc.runtime.distributed.channel import Channel
from mkc.runtime.distributed.following import LeadingBackend
from mkc.runtime.distributed.following import follow
from mkc.runtime.distributed.runtime import RESTART
from mkc.runtime.distributed.runtime import START_SECONDS
from mkc.runtime.distributed.runtime import Launch
from mkc.runtime.distributed.runtime import agree
from mkc.runtime.distributed.runtime import is_leader
from mkc.runtime.distributed.runtime import join
from mkc.runtime.distributed.runtime import leave

__all__ = [
    "RESTART",
    "START_SECONDS",
    "Channel",
    "Launch",
    "LeadingBackend",
    "agree",
    "follow",
    "is_leader",
    "join",
    "leave",
]
