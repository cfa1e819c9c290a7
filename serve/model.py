"""What is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mkc.runtime.backends import Backend
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import Chat
from mkc.runtime.text import Tokenizer


class Pictures(Protocol):
    """Pictures of the kernel that runs."""

    @property
    def names(self) -> tuple[str, ...]:
        """File names, each of a page of its own."""
        ...

    def draw(self) -> Mapping[str, bytes]:
        """All of them by name; the first time takes seconds."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """An opened checkpoint.

    Attributes:
      name: by which requests name it.
      aliases: other names that requests may use.
      prefix_cache: of the backend; None to read every prompt from its start.
      sampling: what the checkpoint asks for, where a request says nothing.
      description: one line for people: what runs, and what it holds.
      scheme: how tokens are drafted, `none` for not at all.
      fingerprint: the same for servers that run the same graph, backend and context.
      target: what the kernel was made for; empty without a kernel.
      hbm_bytes, vmem_bytes: of each device, None where no plan says so.
      step_floor_us: predicted least time of a round, None where no prediction applies.
      pictures: None without a plan.
    """

    name: str
    aliases: tuple[str, ...] = ()
    backend: Backend
    tokenizer: Tokenizer
    chat: Chat
    sampling: SamplingParams
    description: str
    scheme: str
    fingerprint: str
    target: str = ""
    hbm_bytes: int | None = None
    vmem_bytes: int | None = None
    step_floor_us: float | None = None
    prefix_cache: PrefixCache | None = None
    pictures: Pictures | None = None
