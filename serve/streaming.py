"""When a stream tells how many tokens it took."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from mkc.runtime.request import Delta
from mkc.runtime.request import Finish
from mkc.runtime.request import FinishReason
from mkc.runtime.request import SequenceStatistics
from serve.outcome import usage_of
from serve.schemas.base import StreamOptions
from serve.schemas.base import Usage
from serve.ticket import Ticket


@dataclass(kw_only=True)
class StreamUsage:
    """Counts while the chunks go out.

    Attributes:
      at_end: send it once, in a chunk of its own.
      in_chunks: send it with every chunk.
    """

    at_end: bool
    in_chunks: bool
    _prompts: int = 1
    _finishes: list[Finish] = field(default_factory=list)

    @classmethod
    def of(cls, options: StreamOptions | None, *, force: bool) -> StreamUsage:
        """What the options of a request ask for; `force` sends it at the end in any case."""
        wanted = options is not None and bool(options.include_usage)
        every = options is not None and bool(options.continuous_usage_stats)
        return cls(at_end=wanted or force, in_chunks=wanted and every)

    def begin(self, ticket: Ticket, *, prompts: int) -> None:
        self._prompts = prompts
        self._finishes = [
            Finish(
                reason=FinishReason.STOP,
                statistics=SequenceStatistics(prompt_tokens=len(one.tokens)),
            )
            for one in ticket.requests
        ]

    def take(self, index: int, delta: Delta) -> None:
        if delta.finish is not None:
            self._finishes[index] = delta.finish
        else:
            self._finishes[index].statistics.output_tokens += len(delta.tokens)

    def so_far(self) -> Usage:
        return usage_of(self._finishes, prompts=self._prompts)
