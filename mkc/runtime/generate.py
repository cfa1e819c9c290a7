"""The generation loop: requests into slots, tokens and text out as rounds finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import replace
from secrets import randbits
from time import perf_counter

from mkc.errors import PromptLengthError
from mkc.errors import PromptTokenError
from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import DraftingBackend
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Delta
from mkc.runtime.request import Output
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SEED_BITS
from mkc.runtime.sampling import Choice
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.sequence import RunningSequence
from mkc.runtime.shards import Array
from mkc.runtime.text.detokenizer import Detokenizer
from mkc.runtime.text.formats import TagFormat
from mkc.runtime.text.output import OutputStream
from mkc.runtime.text.output import TextReader
from mkc.runtime.text.stop import StopStrings
from mkc.runtime.text.tag_output import TagParser
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.token_masks import Masks

NO_TAGS = TagFormat(reasoning_open="", reasoning_close="", call_open="")


class Generator:
    """Runs up to `backend.batch` sequences at once; each has a slot of the backend.

    What a sequence becomes depends on its own request only: not on what runs beside it, on its
    slot, on how many rounds a launch has, nor on what the prefix cache holds. For that, prompts are
    cut at fixed positions: at the multiples of `chunk_rows`.

    Not for use by several threads at once.

    Attributes:
      chunk_rows: prompt tokens fed between two decode rounds of the other sequences.
      drafts: let a backend that can draft do it; may be changed between two calls.
      draft_rounds: how many rounds of a sequence that had drafts accepted 0, 1, ... of them.
      drafted: drafts that were verified in these rounds.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tokenizer: Tokenizer | None = None,
        stop_ids: Iterable[int] | None = None,
        prefix_cache: PrefixCache | None = None,
        chunk_rows: int | None = None,
        new_seed: Callable[[], int] = lambda: randbits(SEED_BITS),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        Args:
          tokenizer: for text and stop strings; without it deltas have no text.
          stop_ids: ids that end every sequence; by default those of the tokenizer.
          prefix_cache: of this backend; its chunks are the generator's.
          chunk_rows: by default those of the prefix cache, or of the largest prefill program.
          new_seed: for sampling without a seed.
          clock: seconds.
        """
        self.backend = backend
        self.tokenizer = tokenizer
        self.prefix_cache = prefix_cache
        rows = prefix_cache.rows if prefix_cache is not None else backend.prefill_rows
        self.chunk_rows = rows if chunk_rows is None else chunk_rows
        assert prefix_cache is None or prefix_cache.rows == self.chunk_rows, "chunks differ"
        known = tokenizer.stop_ids if tokenizer is not None else ()
        self.drafts = True
        # Looked at once: it takes longer than the rest of a round's bookkeeping.
        self._drafting = backend if isinstance(backend, DraftingBackend) else None
        most = self._drafting.drafts if self._drafting is not None else 0
        self.draft_rounds = [0] * (most + 1)
        self.drafted = 0
        self.stop_ids = frozenset(known if stop_ids is None else stop_ids)
        self._new_seed = new_seed
        self._clock = clock
        self._running: dict[int, RunningSequence] = {}
        self._added_at: dict[int, float] = {}
        self._free = list(range(backend.batch))
        self._next_number = 0

    @property
    def free_slots(self) -> int:
        """How many requests can be added now."""
        return len(self._free)

    @property
    def running(self) -> tuple[int, ...]:
        """Sequences that have not ended, oldest first."""
        return tuple(self._running)

    def slot(self, sequence: int) -> int:
        """The slot of a running sequence."""
        return self._running[sequence].slot

    def statistics(self, sequence: int) -> SequenceStatistics:
        """What a running sequence has taken so far; afterwards see `Finish.statistics`."""
        return replace(self._running[sequence].statistics, seconds=self._elapsed(sequence))

    def check(self, request: Request) -> int:
        """The most tokens that the request may generate.

        Raises:
          PromptTokenError: the prompt is empty or has ids that are no tokens.
          PromptLengthError: the prompt, or what is asked for beyond it, exceeds the context.
        """
        vocab, context = self.backend.vocab, self.backend.context
        length = len(request.tokens)
        if not length:
            raise PromptTokenError(problem="is empty", vocab=vocab)
        for token in request.tokens:
            if not 0 <= token < vocab:
                raise PromptTokenError(problem=f"has the token id {token}", vocab=vocab)
        if length + (request.max_tokens or 1) > context:
            raise PromptLengthError(prompt=length, context=context, max_tokens=request.max_tokens)
        return request.max_tokens or context - length

    def add(self, request: Request) -> int:
        """Gives a request a slot, which must be free. Returns the sequence's number.

        Raises:
          MkcError: see `check`, and a stop string is empty.
        """
        max_tokens = self.check(request)
        assert self._free, "no slot is free; look at free_slots before"
        seed = request.sampling.seed
        sequence = RunningSequence(
            request,
            number=self._next_number,
            slot=self._free[0],
            vocab=self.backend.vocab,
            max_tokens=max_tokens,
            stop_ids=request.stop_ids if request.ignore_eos else self.stop_ids | request.stop_ids,
            seed=self._new_seed() if seed is None else seed,
            output=request.output or self._plain_output(request),
        )
        self._added_at[sequence.number] = self._clock()
        self._next_number += 1
        self._free.pop(0)
        self._running[sequence.number] = sequence
        self._start(sequence)
        return sequence.number

    def prefill(self, sequence: int) -> Delta:
        """Reads the rest of a sequence's prompt at once; the delta has the first token."""
        found = self._running[sequence]
        assert found.prefilled < len(found.prompt), "the prompt has been read"
        while found.prefilled < len(found.prompt):
            self._prefill_chunk(found)
        return self._deltas([found])[0]

    def rounds(self, count: int | None = None) -> list[Delta]:
        """One turn: a chunk of the oldest unread prompt, then a launch for all other sequences.

        A prompt that nobody waits beside has its turn alone: its first token comes from the prompt,
        and is delivered before the first launch, which may have to be compiled. Where some of the
        sequences draft and some cannot, each kind has a launch of its own.

        Args:
          count: most rounds of the launch; None for as many as the backend runs in one. There is
            one round when a sequence needs its logits on the host.

        Returns:
          Deltas of the sequences of which something is new.
        """
        unread = [one for one in self._running.values() if one.prefilled < len(one.prompt)]
        alone = not any(one.is_ready for one in self._running.values())
        if unread:
            self._prefill_chunk(unread[0])
        ready = [one for one in self._running.values() if one.is_ready]
        if unread and alone:
            ready = []
        for drafting, group in self._groups(ready):
            self._launch(group, count, drafting)
        touched = [one for one in (*unread[:1], *ready) if one.output or one.finish is not None]
        return self._deltas(list({one.number: one for one in touched}.values()))

    def cancel(self, sequence: int) -> Delta:
        """Ends a sequence and frees its slot. The delta has what was not delivered yet."""
        found = self._running[sequence]
        found.cancel()
        return self._deltas([found])[0]

    def run(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Generates all requests, in order as slots become free; they are numbered in order."""
        waiting = deque(requests)
        while waiting or self._running:
            while waiting and self._free:
                self.add(waiting.popleft())
            yield from self.rounds()

    def generate(self, request: Request) -> Output:
        """Generates one request while nothing else is running.

        Raises:
          MkcError: the request is refused, or ends with an error.
        """
        assert not self._running, "other sequences are running; use rounds"
        deltas = list(self.run([request]))
        finish = deltas[-1].finish
        assert finish is not None
        if finish.error is not None:
            raise finish.error
        return Output(
            tokens=tuple(token for one in deltas for token in one.tokens),
            events=tuple(event for one in deltas for event in one.events),
            text="".join(one.text for one in deltas),
            logprobs=tuple(entry for one in deltas for entry in one.logprobs),
            alternatives=tuple(entry for one in deltas for entry in one.alternatives),
            finish=finish,
        )

    def _plain_output(self, request: Request) -> OutputStream | None:
        """Reads an output that is all content; nothing without a tokenizer."""
        if self.tokenizer is None:
            assert not request.stop_strings, "stop strings need a tokenizer"
            return None
        reader = TextReader(
            Detokenizer(self.tokenizer, prompt=request.tokens),
            StopStrings(request.stop_strings, include=request.include_stop),
            TagParser(NO_TAGS, in_reasoning=False, tools=None),
        )
        return OutputStream(reader, stop_ids=())

    def _start(self, sequence: RunningSequence) -> None:
        """Prepares the slot: empty, or with the longest prefix that the cache knows."""
        found = self.prefix_cache.find(sequence.prompt) if self.prefix_cache is not None else []
        if not found:
            self.backend.reset(sequence.slot)
            return
        self.backend.restore(sequence.slot, found)
        sequence.prefilled = found[-1].end
        sequence.statistics.cached_tokens = found[-1].end

    def _prefill_chunk(self, sequence: RunningSequence) -> None:
        """Feeds the prompt up to the next border; at its end the first token is chosen."""
        start = sequence.prefilled
        border = (start // self.chunk_rows + 1) * self.chunk_rows
        chunk = sequence.prompt[start:border]
        logits = self.backend.prefill(sequence.slot, chunk, start)
        sequence.prefilled = start + len(chunk)
        cache = self.prefix_cache
        known = sequence.prompt[: sequence.prefilled]
        if cache is not None and cache.wants(known):
            snapshot = self.backend.save(sequence.slot, start=start, end=sequence.prefilled)
            cache.add(known, snapshot)
        if sequence.prefilled == len(sequence.prompt):
            sequence.choose(logits)
            sequence.statistics.prefill_seconds = self._elapsed(sequence.number)

    def _groups(
        self, ready: list[RunningSequence]
    ) -> list[tuple[DraftingBackend | None, list[RunningSequence]]]:
        """Sequences by launch, with what drafts for them.

        Whether one of them drafts must not depend on the others.
        """
        drafting = self._drafting if self.drafts else None
        if drafting is None:
            return [(None, ready)] if ready else []
        drafted = [one for one in ready if _may_draft(drafting, one)]
        others = [one for one in ready if not _may_draft(drafting, one)]
        return [(by, group) for by, group in ((drafting, drafted), (None, others)) if group]

    def _launch(
        self, ready: list[RunningSequence], count: int | None, drafting: DraftingBackend | None
    ) -> None:
        """Decode rounds for sequences that have a token to feed."""
        slots = self.backend.batch
        masks = self._masks(ready) if drafting is None else self._row_masks(drafting, ready)
        going = [one for one in ready if one.finish is None]
        if not going:
            return
        if any(one.is_restricted for one in going):
            count = 1
        tokens, positions = [0] * slots, [0] * slots
        active = [False] * slots
        rounds = [1] * slots
        stop_ids: list[list[int]] = [[] for _ in range(slots)]
        for one in going:
            tokens[one.slot] = one.output[-1]
            positions[one.slot] = one.position
            active[one.slot] = True
            rounds[one.slot] = self._launch_rounds(one, count)
            # A launch looks for so many; the host for all of them.
            stop_ids[one.slot] = sorted(one.stop_ids)[: self.backend.stop_ids_per_launch]
        if drafting is not None:
            rows = tokens, positions, active
            self._speculate(drafting, going, rows, max(rounds), stop_ids, masks)
        elif any(one.needs_logits for one in going):
            result = self.backend.step(tokens, positions, active, masks=masks)
            for one in going:
                one.statistics.rounds += 1
                if one.needs_logits:
                    one.choose(result.logits[one.slot])
                else:
                    one.take(Choice(token=int(result.next_token[one.slot])))
        else:
            emitted = self.backend.greedy_rounds(
                tokens, positions, active, rounds=rounds, stop_ids=stop_ids, masks=masks
            )
            by_slot: list[list[int]] = emitted.T.tolist()
            for one in going:
                self._take_all(one, by_slot[one.slot])
        for one in going:
            one.statistics.launches += 1

    def _masks(self, ready: list[RunningSequence]) -> Masks:
        """Of the next token of each slot; of others than greedy sequences the host applies it."""
        masks: list[Array | None] = [None] * self.backend.batch
        for one in ready:
            if not one.needs_logits:
                masks[one.slot] = one.token_mask()
        return masks

    def _row_masks(self, backend: DraftingBackend, ready: list[RunningSequence]) -> Masks:
        """Of the token behind each row of a round, along the drafts that are in it."""
        rows = backend.drafts + 1
        masks: list[Array | None] = [None] * (self.backend.batch * rows)
        for one in ready:
            if one.is_restricted:
                drafts = backend.next_drafts(one.slot, one.output[-1], one.position)
                found = one.row_masks(drafts)
                masks[one.slot * rows : one.slot * rows + len(found)] = found
        return masks

    def _speculate(
        self,
        backend: DraftingBackend,
        going: list[RunningSequence],
        rows: tuple[list[int], list[int], list[bool]],
        rounds: int,
        stop_ids: list[list[int]],
        masks: Masks,
    ) -> None:
        """Rounds with drafts; each may emit several tokens."""
        slots = range(self.backend.batch)
        by_slot = {one.slot: one for one in going}
        launch = backend.speculate(
            *rows,
            rounds=rounds,
            budgets=[by_slot[slot].remaining if slot in by_slot else 0 for slot in slots],
            sampling=[
                by_slot[slot].request.sampling if slot in by_slot else SamplingParams()
                for slot in slots
            ],
            seeds=[by_slot[slot].seed if slot in by_slot else 0 for slot in slots],
            stop_ids=stop_ids,
            masks=masks,
        )
        for one in going:
            for emitted, drafts in launch.of(one.slot):
                if one.finish is not None:
                    break
                one.statistics.rounds += 1
                one.statistics.drafted += drafts
                before = len(one.output)
                one.take_proposed(emitted)
                accepted = min(len(one.output) - before, len(emitted) - 1)
                one.statistics.accepted += accepted
                self.draft_rounds[accepted] += bool(drafts)
                self.drafted += drafts

    def _launch_rounds(self, sequence: RunningSequence, count: int | None) -> int:
        """How many rounds of one launch a sequence may run."""
        most = self.backend.rounds_per_launch
        return min(most if count is None else count, most, sequence.remaining)

    def _take_all(self, sequence: RunningSequence, tokens: list[int]) -> None:
        """Takes the tokens of a launch up to the end of the sequence."""
        for token in tokens:
            if sequence.finish is not None:
                return
            sequence.statistics.rounds += 1
            sequence.take(Choice(token=token))

    def _deltas(self, sequences: list[RunningSequence]) -> list[Delta]:
        """Takes what is new; slots of sequences that have ended become free."""
        deltas = []
        for one in sequences:
            if one.finish is not None:
                one.statistics.seconds = self._elapsed(one.number)
                self.backend.reset(one.slot)
                del self._running[one.number], self._added_at[one.number]
                self._free = sorted([*self._free, one.slot])
            deltas.append(one.take_delta())
        return deltas

    def _elapsed(self, sequence: int) -> float:
        return self._clock() - self._added_at[sequence]


def _may_draft(backend: DraftingBackend, sequence: RunningSequence) -> bool:
    greedy = sequence.request.sampling.temperature == 0.0
    return sequence.may_draft and (backend.draws or greedy)
