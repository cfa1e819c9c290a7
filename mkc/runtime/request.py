"""What is asked of the generator, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum
from typing import Protocol

from mkc.errors import GenerationOptionError
from mkc.errors import MkcError
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.sampling import TokenLogprob
from mkc.runtime.shards import Array
from mkc.runtime.text.events import ContentDelta
from mkc.runtime.text.events import Event
from mkc.runtime.text.output import OutputStream


class TokenConstraint(Protocol):
    """Says which tokens may come next, such as those that continue a text of some grammar.

    It follows the output of one request, so every request needs one of its own.
    """

    def mask(self) -> Array | None:
        """Which tokens may come next, at least one; None for all.

        Returns:
          Words u32 [ceil(vocab / 32)]: token t is allowed when bit t % 32 of word t // 32 is set.
        """
        ...

    def take(self, token: int) -> None:
        """A token of the output, in order; the one that ends it is taken too."""
        ...

    def copy(self) -> TokenConstraint:
        """Another one that stands where this one does, to look ahead along drafts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate.

    Attributes:
      tokens: the prompt.
      max_tokens: most tokens of the output, the last one included; None for what the context holds.
      min_tokens: stop ids are not chosen before the output has so many tokens.
      stop_ids: token ids that end it, besides those of the generator.
      stop_strings: strings that end it, wherever they begin and end between tokens.
      include_stop: the stop string itself is shown.
      ignore_eos: the generator's own stop ids do not count.
      output: reads the output, as `mkc.runtime.text.Chat.output` gives it: its events and its stop
        strings then count instead of those of this request.
      constraint: says which tokens may come next, of this request alone.
      draft: let a backend that can draft do it.

    Raises:
      GenerationOptionError: a number is out of its range.
    """

    tokens: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    output: OutputStream | None = None
    constraint: TokenConstraint | None = None
    draft: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise GenerationOptionError(
                option="max_tokens", got=self.max_tokens, expected="at least 1"
            )
        if not 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens):
            raise GenerationOptionError(
                option="min_tokens", got=self.min_tokens, expected="0 to max_tokens"
            )


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(kw_only=True)
class SequenceStatistics:
    """What one sequence took. Times are in seconds since the request was added.

    Attributes:
      prompt_tokens: tokens of the prompt; of these, `cached_tokens` came from the prefix cache.
      output_tokens: emitted tokens, a stop id included.
      rounds: steps that emitted tokens for it, prefill not counted.
      launches: calls of the backend for these steps.
      drafted, accepted: tokens that a draft proposed, and those of them that were emitted.
      prefill_seconds: when the prompt had been read.
      seconds: when the sequence ended, or was last looked at.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    launches: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first one; 0 when there are none."""
        elapsed = self.seconds - self.prefill_seconds
        return (self.output_tokens - 1) / elapsed if self.output_tokens > 1 and elapsed > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a sequence ended.

    Attributes:
      stop: the stop id or stop string that ended it.
      error: what went wrong, for `FinishReason.ERROR`.
    """

    reason: FinishReason
    statistics: SequenceStatistics
    stop: int | str | None = None
    error: MkcError | None = None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of one sequence.

    Attributes:
      sequence: as `Generator.add` numbered it.
      tokens: new token ids, a stop id included.
      events: what the new text means: thoughts, content, tool calls. They lag behind the tokens
        while a character or a stop string may be incomplete.
      logprobs, alternatives: one entry per token if the request asked for them, else empty.
      finish: set in the last delta of a sequence.
    """

    sequence: int
    tokens: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    alternatives: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """New text of the answer itself."""
        return "".join(one.text for one in self.events if isinstance(one, ContentDelta))


@dataclass(frozen=True, kw_only=True)
class Output:
    """A whole generated sequence; the attributes are those of all its deltas joined."""

    tokens: tuple[int, ...]
    events: tuple[Event, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    alternatives: tuple[tuple[TokenLogprob, ...], ...]
    finish: Finish
