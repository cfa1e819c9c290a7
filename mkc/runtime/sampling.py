"""Choosing a token from logits: pure functions of one sequence, so batching cannot change a result.

The order is penalties, biases, mask of allowed tokens, temperature, top-k, min-p, top-p. A removed
token has the logit minus infinity. Randomness has no state: a number is a function of the seed and
of the position of the token that is chosen with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from math import inf
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkc.errors import GenerationOptionError
from mkc.errors import NotFiniteLogitsError
from mkc.errors import NoTokenAllowedError

type Array = NDArray[Any]

# Uses of randomness at one position get streams of their own.
CHOICE = 0
SEED_BITS = 64
MOST_ALTERNATIVES = 20
# How many of the largest logits are sorted first when the nucleus is looked for.
FIRST_CANDIDATES = 256


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen.

    Attributes:
      temperature: divides the logits; 0 takes the largest one, the lowest id on ties.
      top_k: keep so many of the largest logits, the lowest ids on ties; 0 keeps all.
      min_p: keep tokens with at least this share of the largest probability; 0 keeps all.
      top_p: keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
      repetition_penalty: logits of tokens in prompt or output are divided by it when positive,
        multiplied when negative; 1 changes nothing.
      presence_penalty: subtracted from the logits of tokens in the output.
      frequency_penalty: subtracted once for each time the token is in the output.
      logit_bias: added, by token id; minus infinity removes a token.
      seed: of the random numbers; None lets the generator choose one.
      alternatives: so many most probable tokens are returned with their log-probabilities, 0 for
        that of the chosen one only; None for none at all.

    Raises:
      GenerationOptionError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    alternatives: int | None = None

    def __post_init__(self) -> None:
        heat = self.temperature
        _check(self, "temperature", isfinite(heat) and heat >= 0, "a number of 0 or more")
        _check(self, "top_k", self.top_k >= 0, "0 for all tokens, or how many to keep")
        _check(self, "min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        _check(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        penalty = self.repetition_penalty
        _check(self, "repetition_penalty", isfinite(penalty) and penalty > 0, "a number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(self, name, isfinite(getattr(self, name)), "a finite number")
        usable = all(bias < inf and token >= 0 for token, bias in self.logit_bias.items())
        _check(self, "logit_bias", usable, "token ids with numbers below infinity")
        in_range = self.seed is None or 0 <= self.seed < 1 << SEED_BITS
        _check(self, "seed", in_range, f"0 to 2^{SEED_BITS} - 1")
        shown = self.alternatives
        enough = shown is None or 0 <= shown <= MOST_ALTERNATIVES
        _check(self, "alternatives", enough, f"0 to {MOST_ALTERNATIVES}")

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """The token with the largest logit, and nothing else, is wanted."""
        changed = self.has_penalties or bool(self.logit_bias)
        return self.temperature == 0.0 and not changed and self.alternatives is None


def _check(params: SamplingParams, option: str, holds: bool, expected: str) -> None:
    if not holds:
        raise GenerationOptionError(option=option, got=getattr(params, option), expected=expected)


class TokenCounts:
    """Which tokens a sequence has, for penalties.

    Attributes:
      seen: bool [vocab], in prompt or output.
      emitted: i32 [vocab], times in the output.
    """

    def __init__(self, vocab: int, prompt: Sequence[int]) -> None:
        self.seen = np.zeros(vocab, bool)
        self.emitted = np.zeros(vocab, np.int32)
        self.seen[list(prompt)] = True

    def add(self, token: int) -> None:
        """Counts a token of the output."""
        self.seen[token] = True
        self.emitted[token] += 1


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token with the logarithm of its probability."""

    token: int
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen token.

    Attributes:
      logprob: of the token under the model, before penalties, biases, mask and temperature; None
        unless asked for.
      alternatives: the most probable tokens under the model, best first, lowest ids on ties.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[TokenLogprob, ...] = ()


def choose(
    logits: Array,
    params: SamplingParams,
    *,
    position: int,
    seed: int = 0,
    counts: TokenCounts | None = None,
    allowed: Array | None = None,
) -> Choice:
    """Chooses the token of one position.

    Args:
      logits: f32 [vocab].
      position: of the chosen token in its sequence.
      seed: used instead of `params.seed`, which may be None.
      counts: needed for penalties.
      allowed: bool [vocab]; None allows all.

    Raises:
      NotFiniteLogitsError: a logit is NaN or infinity.
      NoTokenAllowedError: nothing is left to choose from.
    """
    if not (logits < inf).all():
        raise NotFiniteLogitsError(position=position)
    changed = changed_logits(logits, params, counts=counts, allowed=allowed)
    if not (changed > -inf).any():
        raise NoTokenAllowedError(position=position)
    if params.temperature == 0.0:
        token = int(np.argmax(changed))
    else:
        ids, probabilities = kept_tokens(changed, params)
        token = draw(ids, probabilities, uniform(seed, position))
    if params.alternatives is None:
        return Choice(token=token)
    logprobs = log_softmax(logits)
    best = largest(logits, params.alternatives) if params.alternatives else ()
    return Choice(
        token=token,
        logprob=float(logprobs[token]),
        alternatives=tuple(TokenLogprob(token=int(i), logprob=float(logprobs[i])) for i in best),
    )


def changed_logits(
    logits: Array,
    params: SamplingParams,
    *,
    counts: TokenCounts | None = None,
    allowed: Array | None = None,
) -> Array:
    """Logits after penalties, biases and mask, f32 [vocab]; the argument is not changed."""
    changed = logits
    if params.has_penalties:
        assert counts is not None, "penalties need the tokens of the sequence"
        changed = penalised(changed, params, counts)
    if params.logit_bias:
        changed = changed.copy()
        ids = sorted(params.logit_bias)
        assert ids[-1] < len(logits), f"a bias for token {ids[-1]} of {len(logits)}"
        changed[ids] += np.array([params.logit_bias[one] for one in ids], np.float32)
    if allowed is not None:
        changed = np.where(allowed, changed, np.float32(-inf))
    return changed


def penalised(logits: Array, params: SamplingParams, counts: TokenCounts) -> Array:
    """Logits after repetition, presence and frequency penalties, in this order."""
    repetition = np.float32(params.repetition_penalty)
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    changed = np.where(counts.seen, repeated, logits)
    changed = changed - np.float32(params.presence_penalty) * (counts.emitted > 0)
    penalty = np.float32(params.frequency_penalty) * counts.emitted.astype(np.float32)
    result: Array = (changed - penalty).astype(np.float32)
    return result


def kept_tokens(logits: Array, params: SamplingParams) -> tuple[Array, Array]:
    """What a token is drawn from: ids, ascending, and their probabilities f64, with sum 1.

    Args:
      logits: after penalties, biases and mask; at least one is above minus infinity.
    """
    # A positive temperature does not change the order, so the few largest can be found first.
    ids = np.sort(largest(logits, params.top_k)) if params.top_k else np.arange(len(logits))
    ids = ids[logits[ids] > -inf]
    # A product with the reciprocal could overflow for the smallest temperatures.
    scaled = (logits[ids].astype(np.float64) - float(logits.max())) / params.temperature
    weights = np.exp(scaled)
    if params.min_p > 0:
        keep = weights >= params.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    if params.top_p < 1:
        keep = nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def nucleus(weights: Array, mass: float) -> Array:
    """Indices, ascending, of the fewest largest weights with at least `mass` of their sum."""
    wanted = mass * weights.sum()
    count = min(FIRST_CANDIDATES, len(weights))
    while True:
        best = largest(weights, count)
        sums = np.cumsum(weights[best])
        if sums[-1] >= wanted or count == len(weights):
            # Rounding may leave the sum of all just below what is wanted.
            last = min(int(np.searchsorted(sums, wanted)), count - 1)
            return np.sort(best[: last + 1])
        count = min(4 * count, len(weights))


def largest(values: Array, count: int) -> Array:
    """Indices of the `count` largest values, in descending order, lowest indices on ties."""
    count = min(count, len(values))
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: count - len(above)]
        found = np.sort(np.concatenate([above, equal]))
    else:
        found = np.arange(len(values))
    order: Array = found[np.argsort(-values[found], kind="stable")]
    return order


def draw(ids: Array, probabilities: Array, number: float) -> int:
    """The id at which the sum of probabilities first exceeds `number`, from 0 up to below 1."""
    sums = np.cumsum(probabilities)
    place = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def uniform(seed: int, position: int, stream: int = CHOICE) -> float:
    """A random number from 0 up to below 1, with 53 bits, for a position of a sequence.

    Args:
      stream: which of several independent numbers of the position.
    """
    key = np.array([seed, stream], np.uint64)
    counter = np.array([0, 0, 0, position], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return float(bits >> 11) / float(1 << 53)


def log_softmax(logits: Array) -> Array:
    """Logarithms of the model's probabilities, f64 [vocab]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result
