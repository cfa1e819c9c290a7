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
from math import log
from typing import Any
from typing import NamedTuple

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
MOST_TOP_K = 2**31 - 1  # launches take it as i32
# How many of the largest logits are looked at first when the nucleus is wanted.
FIRST_CANDIDATES = 256
# Above so many values per wanted one, the largest are first narrowed down by the maxima of groups.
GROUP_SIZE = 256
# An f32 exponential of an f32 quotient is right to (|quotient| + 3) units of 2^-23, and the mean of
# |quotient| under the weights exp(quotient) is at most ln(vocabulary) + 1, so below 16.
ROUGH_ERROR = 2.0**-18
ROUGH_TEMPERATURE = 1e-3  # below, quotients of f32 say too little


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
        in_range = 0 <= self.top_k <= MOST_TOP_K
        _check(self, "top_k", in_range, "0 for all tokens, or how many to keep, below 2^31")
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
    def keeps_all(self) -> bool:
        """Every token that is allowed may be drawn."""
        return self.top_k == 0 and self.min_p == 0.0 and self.top_p == 1.0

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


class Choice(NamedTuple):
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
    if not logits.max() < inf:  # NaN is the maximum wherever there is one
        raise NotFiniteLogitsError(position=position)
    changed = changed_logits(logits, params, counts=counts, allowed=allowed)
    if not changed.max() > -inf:
        raise NoTokenAllowedError(position=position)
    if params.temperature == 0.0:
        token = int(np.argmax(changed))
    elif params.keeps_all:
        token = draw_of_all(changed, params.temperature, uniform(seed, position))
    else:
        token = draw(*kept_tokens(changed, params), uniform(seed, position))
    if params.alternatives is None:
        return Choice(token=token)
    best = largest(logits, params.alternatives)
    logprobs = log_probabilities(logits, np.append(best, token)).tolist()
    return Choice(
        token=token,
        logprob=logprobs.pop(),
        alternatives=tuple(
            TokenLogprob(token=one, logprob=logprob)
            for one, logprob in zip(best.tolist(), logprobs, strict=True)
        ),
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
    ids = np.flatnonzero(counts.seen)
    values, emitted = logits[ids], counts.emitted[ids]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - np.float32(params.presence_penalty) * (emitted > 0)
    values = values - np.float32(params.frequency_penalty) * emitted.astype(np.float32)
    changed = logits.copy()
    changed[ids] = values
    return changed


def kept_tokens(logits: Array, params: SamplingParams) -> tuple[Array, Array]:
    """What a token is drawn from: ids, ascending, and their probabilities f64, with sum 1.

    Args:
      logits: after penalties, biases and mask; at least one is above minus infinity.
    """
    # A positive temperature does not change the order, so the few largest can be found first.
    if params.top_k:
        ids = np.sort(largest(logits, params.top_k))
    elif params.min_p > 0:
        ids = np.flatnonzero(logits >= _surely_kept_above(logits, params))
    elif params.top_p < 1:
        ids = nucleus_of_logits(logits, params.temperature, params.top_p)
        weights = _weights(logits[ids], params.temperature)
        return ids, weights / weights.sum()
    else:
        ids = np.arange(len(logits))
    weights = _weights(logits[ids], params.temperature)
    keep = weights >= params.min_p * weights.max() if params.min_p > 0 else weights > 0
    ids, weights = ids[keep], weights[keep]
    if params.top_p < 1:
        keep = nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    weights /= weights.sum()
    return ids, weights


def _surely_kept_above(logits: Array, params: SamplingParams) -> float:
    """A logit, at most a little below the smallest one that min-p keeps."""
    rounding = 1e-9
    bound = float(logits.max()) + params.temperature * (log(params.min_p) - rounding)
    return float(np.nextafter(np.float32(bound), np.float32(-inf)))


def _weights(logits: Array, temperature: float) -> Array:
    """exp((logits - largest) / temperature), f64."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    # A product with the reciprocal could overflow for the smallest temperatures.
    weights /= temperature
    np.exp(weights, out=weights)
    return weights


def nucleus_of_logits(logits: Array, temperature: float, mass: float) -> Array:
    """`nucleus` of the weights of all logits, f32 [vocab], most of which need no f64.

    A rough sum of all weights tells, within its error, how many of the largest are needed. Only
    when that leaves a doubt, or when they are many, are all weights computed and sorted.
    """
    if temperature >= ROUGH_TEMPERATURE and len(logits) > FIRST_CANDIDATES:
        best = largest(logits, FIRST_CANDIDATES)
        sums = np.cumsum(_weights(logits[best], temperature))
        rough = _rough_weights(logits, temperature).sum(dtype=np.float64)
        borders = mass * rough * np.array([1 - ROUGH_ERROR, 1 + ROUGH_ERROR])
        last, also_last = np.searchsorted(sums, borders)
        if last == also_last < len(best):
            kept: Array = np.sort(best[: last + 1])
            return kept
    return nucleus(_weights(logits, temperature), mass)


def _rough_weights(logits: Array, temperature: float) -> Array:
    """As `_weights`, f32; sums are right to ROUGH_ERROR."""
    weights: Array = logits - logits.max()
    weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def nucleus(weights: Array, mass: float) -> Array:
    """Indices, ascending, of the fewest largest weights with at least `mass` of their sum."""
    descending = np.sort(weights)[::-1]
    sums = np.cumsum(descending)
    count = int(np.searchsorted(sums, mass * sums[-1])) + 1
    smallest = descending[count - 1]
    above = np.flatnonzero(weights > smallest)
    equal = np.flatnonzero(weights == smallest)[: count - len(above)]
    kept: Array = np.sort(np.concatenate([above, equal]))
    return kept


def largest(values: Array, count: int) -> Array:
    """Indices of the `count` largest values, in descending order, lowest indices on ties."""
    count = min(count, len(values))
    found = _holding_largest(values, count)
    if count < len(found):
        rest = values[found]
        threshold = np.partition(rest, len(rest) - count)[len(rest) - count]
        above = found[rest > threshold]
        equal = found[rest == threshold][: count - len(above)]
        found = np.sort(np.concatenate([above, equal]))
    order: Array = found[np.argsort(-values[found], kind="stable")]
    return order


def _holding_largest(values: Array, count: int) -> Array:
    """Indices, ascending, of some of the values: all that may be among the `count` largest.

    The maxima of disjoint groups are values themselves, so no more than `count` values are above
    the largest maximum but `count`.
    """
    groups = len(values) // GROUP_SIZE
    if count == 0:
        return np.zeros(0, np.intp)
    if groups < 2 * count:
        return np.arange(len(values))
    maxima = values[: groups * GROUP_SIZE].reshape(GROUP_SIZE, groups).max(axis=0)
    return np.flatnonzero(values >= np.partition(maxima, groups - count)[groups - count])


def draw(ids: Array, probabilities: Array, number: float) -> int:
    """The id at which the share of the sum of probabilities first exceeds `number`.

    Args:
      number: from 0 up to below 1.
    """
    sums = np.cumsum(probabilities)
    place = np.searchsorted(sums, number * sums[-1], side="right")
    # The product may have been rounded up to the whole sum; where that is reached, ids end.
    return int(ids[min(place, np.searchsorted(sums, sums[-1]))])


def draw_of_all(logits: Array, temperature: float, number: float) -> int:
    """As `draw` of all tokens, most of whose weights need no f64.

    Rough sums find the token. Only when `number` is nearer to the ends of the token's interval than
    their error are all weights computed.
    """
    if temperature >= ROUGH_TEMPERATURE and len(logits) > GROUP_SIZE:
        rough = _rough_weights(logits, temperature)
        starts = np.arange(0, len(rough), GROUP_SIZE)
        sums = np.cumsum(np.add.reduceat(rough, starts, dtype=np.float64))
        wanted, error = number * sums[-1], 2 * ROUGH_ERROR * sums[-1]  # of the sum, and of `wanted`
        group = min(int(np.searchsorted(sums, wanted, side="right")), len(starts) - 1)
        before = sums[group - 1] if group else 0.0
        start = starts[group]
        ends = before + np.cumsum(rough[start : start + GROUP_SIZE], dtype=np.float64)
        place = min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
        begin = ends[place - 1] if place else before
        if begin + error < wanted < ends[place] - error:
            return int(start) + place
    return draw(np.arange(len(logits)), _weights(logits, temperature), number)


def uniform(seed: int, position: int, stream: int = CHOICE) -> float:
    """A random number from 0 up to below 1, with 53 bits, for a position of a sequence.

    Args:
      stream: which of several independent numbers of the position.
    """
    key = np.array([seed, stream], np.uint64)
    counter = np.array([0, 0, 0, position], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return float(bits >> 11) / float(1 << 53)


def log_probabilities(logits: Array, ids: Array) -> Array:
    """Logarithms of the model's probabilities of some tokens, f64 [ids]."""
    top = float(logits.max())
    mass = np.exp(logits.astype(np.float64) - top).sum()
    result: Array = logits[ids].astype(np.float64) - top - np.log(mass)
    return result
