"""One sequence while it is generated: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from mkc.errors import MkcError
from mkc.errors import NoTokenAllowedError
from mkc.ir.ops import MASK_BITS
from mkc.runtime.request import Delta
from mkc.runtime.request import Finish
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.request import TokenConstraint
from mkc.runtime.sampling import Choice
from mkc.runtime.sampling import TokenCounts
from mkc.runtime.sampling import TokenLogprob
from mkc.runtime.sampling import choose
from mkc.runtime.shards import Array
from mkc.runtime.text.events import Event
from mkc.runtime.text.output import OutputStream
from mkc.runtime.token_masks import pack_mask
from mkc.runtime.token_masks import unpack_mask


class RunningSequence:
    """Takes the tokens of one sequence, one by one, and says what is new.

    Attributes:
      prompt: its tokens.
      output: emitted tokens.
      prefilled: how many tokens of the prompt the slot remembers.
      max_tokens: most tokens of the output.
      stop_ids: ids that end it.
      needs_logits: a next token is not simply that of the largest logit of the allowed tokens.
      may_draft: drafts are wanted, and a backend that samples can choose the next tokens by itself.
      finish: how it ended, None while it goes on.
    """

    def __init__(
        self,
        request: Request,
        *,
        number: int,
        slot: int,
        vocab: int,
        max_tokens: int,
        stop_ids: Iterable[int],
        seed: int,
        output: OutputStream | None,
    ) -> None:
        self.request = request
        self.number = number
        self.slot = slot
        self.vocab = vocab
        self.max_tokens = max_tokens
        self.seed = seed
        self.prompt = [int(token) for token in request.tokens]
        self.output: list[int] = []
        self.prefilled = 0
        self.stop_ids = frozenset(stop_ids)
        sampling = request.sampling
        plain = not sampling.has_penalties and not sampling.logit_bias
        self.needs_logits = not sampling.is_plain_greedy
        self.may_draft = request.draft and plain and sampling.alternatives is None
        self.finish: Finish | None = None
        self.statistics = SequenceStatistics(prompt_tokens=len(self.prompt))
        self._counts = TokenCounts(vocab, self.prompt) if sampling.has_penalties else None
        self._reader = output
        self._dead_end: int | None = None  # row of a round behind which no token is allowed
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._events: list[Event] = []
        self._logprobs: list[TokenLogprob] = []
        self._alternatives: list[tuple[TokenLogprob, ...]] = []

    @property
    def is_ready(self) -> bool:
        """A token has been emitted that can be fed."""
        return bool(self.output) and self.finish is None

    @property
    def position(self) -> int:
        """Of the last emitted token, which is fed next."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.output)

    @property
    def is_restricted(self) -> bool:
        """What is allowed next may depend on the token before it."""
        return self.request.constraint is not None or self._stops_wait

    @property
    def _stops_wait(self) -> bool:
        """The output is too short to be ended by the next token."""
        return self._stop_waits_at(len(self.output))

    def _stop_waits_at(self, length: int) -> bool:
        """An output of this length is too short to be ended by the next token."""
        return length < self.request.min_tokens and bool(self.stop_ids)

    def choose(self, logits: Array) -> None:
        """Chooses the next token from logits, f32 [vocab], and takes it; or ends with an error."""
        mask = self._allowed()
        try:
            choice = choose(
                logits,
                self.request.sampling,
                position=len(self.prompt) + len(self.output),
                seed=self.seed,
                counts=self._counts,
                allowed=unpack_mask(mask, self.vocab) if mask is not None else None,
            )
        except MkcError as error:
            self._end(FinishReason.ERROR, error=error)
            return
        self.take(choice)

    def take_proposed(self, tokens: Sequence[int]) -> None:
        """Takes the tokens of a round up to the end of the sequence.

        The last one may follow drafts behind which no token is allowed; see `row_masks`.
        """
        for row, token in enumerate(tokens):
            if self.finish is not None:
                return
            if row == self._dead_end:
                self._end_without_token()
                return
            self.take(Choice(token=token))

    def take(self, choice: Choice) -> None:
        """Takes the next token of the output."""
        assert self.finish is None, f"sequence {self.number} has ended"
        token = choice.token
        self.output.append(token)
        self.statistics.output_tokens += 1
        self._tokens.append(token)
        if self.request.constraint is not None:
            self.request.constraint.take(token)
        if choice.logprob is not None:
            self._logprobs.append(TokenLogprob(token=token, logprob=choice.logprob))
            self._alternatives.append(choice.alternatives)
        if self._counts is not None:
            self._counts.add(token)
        if token in self.stop_ids:
            self._end(FinishReason.STOP, stop=token)
            return
        if self._reader is not None:
            update = self._reader.feed([token])
            self._events += update.events
            if update.stopped_by is not None:
                self._end(FinishReason.STOP, stop=update.stopped_by)
                return
        if self.remaining == 0:
            self._end(FinishReason.LENGTH)

    def token_mask(self) -> Array | None:
        """Which tokens the backend may choose next; None for all.

        A mask that allows nothing ends the sequence with an error.
        """
        mask = self._allowed()
        if mask is not None and not mask.any():
            self._end_without_token()
        return mask

    def row_masks(self, drafts: Sequence[int]) -> list[Array | None]:
        """Which tokens the backend may choose next, and behind each of the drafts in turn.

        There is none behind a draft that is not allowed or that ends the sequence, since no row
        behind it counts. None stands for all tokens. See `token_mask` for the first one; when
        another one allows nothing, that shows when its row is reached.
        """
        masks, self._dead_end = [self.token_mask()], None
        if not self.is_restricted:
            return masks
        ahead = self.request.constraint.copy() if self.request.constraint is not None else None
        for row, draft in enumerate(drafts, start=1):
            if draft in self.stop_ids or not _allows(masks[-1], draft):
                break
            if ahead is not None:
                ahead.take(draft)
            masks.append(self._allowed_by(ahead, len(self.output) + row))
            if masks[-1] is not None and not masks[-1].any():
                masks[-1], self._dead_end = None, row
                break
        return masks

    def cancel(self) -> None:
        """Ends the sequence; text that was held back is not shown."""
        self._end(FinishReason.CANCELLED)

    def take_delta(self) -> Delta:
        """What is new since the last call."""
        delta = Delta(
            sequence=self.number,
            tokens=tuple(self._tokens),
            events=tuple(self._events),
            logprobs=tuple(self._logprobs),
            alternatives=tuple(self._alternatives),
            finish=self.finish,
        )
        self._clear()
        return delta

    def _end(
        self,
        reason: FinishReason,
        *,
        stop: int | str | None = None,
        error: MkcError | None = None,
    ) -> None:
        shown_to_the_end = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._reader is not None and shown_to_the_end:
            self._events += self._reader.finish()
        self.finish = Finish(reason=reason, statistics=self.statistics, stop=stop, error=error)

    def _end_without_token(self) -> None:
        position = len(self.prompt) + len(self.output)
        self._end(FinishReason.ERROR, error=NoTokenAllowedError(position=position))

    def _allowed(self) -> Array | None:
        """Tokens that may come next, as words; None for all."""
        return self._allowed_by(self.request.constraint, len(self.output))

    def _allowed_by(self, constraint: TokenConstraint | None, length: int) -> Array | None:
        """Tokens that may follow an output of this length, as words; None for all."""
        mask = constraint.mask() if constraint is not None else None
        if self._stop_waits_at(length):
            allowed = np.ones(self.vocab, bool) if mask is None else unpack_mask(mask, self.vocab)
            allowed[sorted(self.stop_ids)] = False
            mask = pack_mask(allowed)
        return mask


def _allows(mask: Array | None, token: int) -> bool:
    """Whether a mask of words allows a token."""
    return mask is None or bool(mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & 1)
