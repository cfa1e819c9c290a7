"""Before the first request: compile what will run, and check what it does."""

from __future__ import annotations

from math import floor
from math import inf
from math import log2
from typing import Any

from mkc.errors import BootCheckError
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Output
from mkc.runtime.request import Request
from mkc.runtime.sampling import MOST_ALTERNATIVES
from mkc.runtime.sampling import SamplingParams
from serve.model import ServedModel

PROMPTS = (
    "The quick brown fox jumps over the lazy dog. The",
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time",
)
NO_SCHEME = "none"
MOST_TOKENS = 32  # of each output
BF16_UNIT = 2.0**-7  # the last place of a number from 1 to 2
TINY = 2.0**-20


def warm_up(model: ServedModel) -> None:
    """Runs whatever is compiled when it first runs: no request has to wait for that later.

    These are prompts of all block sizes, saved states, and steps whose tokens the device, the host
    or a drafter chooses.
    """
    backend = model.backend
    cache = PrefixCache(rows=backend.prefill_rows, max_bytes=1 << 30)
    generator = Generator(backend, stop_ids=(), prefix_cache=cache)
    longest = min(backend.prefill_rows + 1, backend.context - 2)
    lengths = [1 << power for power in range(longest.bit_length()) if 1 << power < longest]
    for length in [*lengths, longest, longest]:
        generator.generate(Request(tokens=[0] * length, max_tokens=2))
    for sampling in (SamplingParams(alternatives=1), SamplingParams(temperature=1.0)):
        generator.generate(Request(tokens=[0], max_tokens=2, sampling=sampling))
    most = min(3, backend.context - 1)  # two rounds in a launch
    generator.generate(Request(tokens=[0], max_tokens=most, draft=False))


def boot_check(model: ServedModel, *, backend: str, scheme: str | None) -> str:
    """Decodes known prompts with and without drafts; returns what was found, for people.

    A round computes several rows at once, so its sums may be rounded in another order. Where two
    tokens are one unit in the last place of bf16 apart, either may come; what follows such a place
    is not compared.

    Args:
      backend, scheme: what was asked for; None for the model's own scheme.

    Raises:
      BootCheckError: something else runs, or the outputs differ.
    """
    for what, got, wanted in (
        ("backend", str(model.backend.name), backend),
        ("scheme", model.scheme, scheme),
    ):
        if wanted is not None and got != wanted:
            raise BootCheckError(
                problem=f"the {what} that runs is '{got}'",
                expected=f"'{wanted}'",
                hint="Start with what can run here, or correct the machine",
            )
    compared = [_compare(model, prompt) for prompt in PROMPTS]
    how = "twice, without a drafter" if model.scheme == NO_SCHEME else "with and without drafts"
    return f"boot check passed: {sum(compared)} tokens are the same {how}"


def _compare(model: ServedModel, text: str) -> int:
    """How many tokens of an output are the same, which is all of them or those up to a tie."""
    ids = [*model.tokenizer.prefix_ids, *model.tokenizer.encode(text, allow_special=False)]
    count = max(1, min(MOST_TOKENS, model.backend.context - len(ids)))
    ids = ids[: model.backend.context - count]

    def output(**options: Any) -> Output:
        generator = Generator(model.backend, stop_ids=())
        return generator.generate(Request(tokens=ids, max_tokens=count, **options))

    drafted = output().tokens
    plain = output(draft=False, sampling=SamplingParams(alternatives=MOST_ALTERNATIVES))
    if drafted == plain.tokens:
        return count
    place = next(at for at in range(count) if drafted[at] != plain.tokens[at])
    known = {one.token: one.logprob for one in plain.alternatives[place]}
    lead = plain.logprobs[place].logprob - known.get(drafted[place], -inf)
    logits = model.backend.prefill(0, [*ids, *plain.tokens[:place]], 0)
    model.backend.reset(0)
    unit = BF16_UNIT * 2.0 ** floor(log2(max(abs(float(logits[plain.tokens[place]])), TINY)))
    if lead > unit:
        raise BootCheckError(
            problem=f"with drafts token {place + 1} of {count} is another one than without, whose "
            f"logit leads by {lead:.3g}",
            expected=f"the same tokens, or a lead of at most {unit:.3g}, a unit of bf16",
            hint="Start with --spec none, and report it: drafts must not change greedy output",
        )
    return place
