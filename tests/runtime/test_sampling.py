"""Sampling: distributions against exact ones, the order of the rules, and what randomness means."""

from __future__ import annotations

from functools import cache
from math import inf
from math import isclose
from math import log
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_allclose
from numpy.testing import assert_array_equal

from mkc.errors import GenerationOptionError
from mkc.errors import NoTokenAllowedError
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.sampling import TokenCounts
from mkc.runtime.sampling import changed_logits
from mkc.runtime.sampling import choose
from mkc.runtime.sampling import draw
from mkc.runtime.sampling import draw_of_all
from mkc.runtime.sampling import kept_tokens
from mkc.runtime.sampling import largest
from mkc.runtime.sampling import log_probabilities
from mkc.runtime.sampling import nucleus
from mkc.runtime.sampling import nucleus_of_logits
from mkc.runtime.sampling import uniform

DRAWS = 50_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.5, -1.0, -inf, 0.0, 3.0], np.float32)


def exact(logits: Array, params: SamplingParams) -> Array:
    """The distribution by the definition of each rule, f64 [vocab], with nothing but loops."""
    scaled = [float(one) / params.temperature for one in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = [token for token in order if scaled[token] > -inf]
    if params.top_k:
        kept = kept[: params.top_k]
    weights = {token: np.exp(scaled[token] - scaled[order[0]]) for token in kept}
    if params.min_p:
        kept = [token for token in kept if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    nucleus_: list[int] = []
    mass = 0.0
    for token in kept:
        if mass < params.top_p * total or params.top_p == 1:
            nucleus_.append(token)
            mass += weights[token]
    result = np.zeros(len(logits))
    for token in nucleus_:
        result[token] = weights[token] / mass
    return result


def distribution(logits: Array, params: SamplingParams) -> Array:
    ids, probabilities = kept_tokens(logits, params)
    full = np.zeros(len(logits))
    full[ids] = probabilities
    return full


@cache
def numbers(seed: int) -> list[float]:
    """The random numbers of positions 0 to DRAWS - 1."""
    return [uniform(seed, position) for position in range(DRAWS)]


RULES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=5, min_p=0.2, top_p=0.9),
]


@pytest.mark.parametrize("params", RULES, ids=str)
def test_frequencies_are_those_of_the_distribution(params: SamplingParams) -> None:
    """Chi-squared over 50,000 draws; the bound is exceeded once in a million times by chance.

    The draws are those of one seed, so the test gives the same result every time.
    """
    expected = exact(LOGITS, params)
    assert_allclose(distribution(LOGITS, params), expected, atol=1e-12)
    ids, probabilities = kept_tokens(LOGITS, params)
    drawn = [draw(ids, probabilities, number) for number in numbers(7)]
    chosen = [choose(LOGITS, params, position=place, seed=7).token for place in range(500)]
    assert chosen == drawn[:500]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any(), "a removed token was drawn"
    wanted = expected[possible] * DRAWS
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    bounds = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3}  # degrees of freedom
    assert statistic < bounds[int(possible.sum()) - 1]


def test_a_draw_takes_the_token_whose_interval_has_the_number() -> None:
    """Intervals begin at their lower end, so a token without probability is never drawn."""
    ids, probabilities = np.array([3, 5, 8]), np.array([0.0, 0.5, 0.5])
    assert [draw(ids, probabilities, number) for number in (0.0, 0.25, 0.5, 0.999)] == [5, 5, 8, 8]


def test_draws_of_different_seeds_are_independent() -> None:
    """Pairs of draws at one position with two seeds have the product distribution."""
    params = SamplingParams(temperature=1.0)
    ids, probabilities = kept_tokens(np.log(np.array([0.5, 0.3, 0.2], np.float32)), params)
    counts = np.zeros((3, 3))
    for pair in zip(numbers(7), numbers(8), strict=True):
        first, second = (draw(ids, probabilities, number) for number in pair)
        counts[first, second] += 1
    wanted = np.outer([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]) * DRAWS
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 42.7  # 8 degrees of freedom, 1e-6


@pytest.mark.parametrize(
    ("temperature", "top_p", "kept"),
    [(1.0, 0.75, {0, 1}), (0.25, 0.75, {0})],
    ids=["flat", "peaked"],
)
def test_temperature_comes_before_top_p(temperature: float, top_p: float, kept: set[int]) -> None:
    """Low temperatures concentrate the mass, so the nucleus shrinks."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert set(kept_tokens(logits, params)[0].tolist()) == kept


def test_top_k_comes_before_top_p() -> None:
    """Of [0.4, 0.3, 0.2, 0.1], the two largest are 4/7 and 3/7: the first alone has half the mass.

    In the other order both would be kept.
    """
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    both = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert kept_tokens(logits, both)[0].tolist() == [0]
    assert kept_tokens(logits, SamplingParams(temperature=1.0, top_p=0.5))[0].tolist() == [0, 1]


def test_min_p_comes_before_top_p() -> None:
    """Without the small ones, 0.4 and 0.3 are the whole mass, and 0.4 is more than half of it."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(temperature=1.0, min_p=0.7, top_p=0.5)
    assert kept_tokens(logits, params)[0].tolist() == [0]


def test_penalties_come_before_temperature_and_biases() -> None:
    """A logit of 2 in the prompt: halved by the penalty, then raised by the bias."""
    logits = np.array([2.0, 0.5], np.float32)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 1.0})
    changed = changed_logits(logits, params, counts=TokenCounts(2, [0]))
    assert_array_equal(changed, np.array([2.0, 0.5], np.float32))
    assert_array_equal(logits, np.array([2.0, 0.5], np.float32))


def test_penalties() -> None:
    """Repetition sees the prompt; presence and frequency see the output only."""
    counts = TokenCounts(5, prompt=[0, 1])
    for token in (2, 2, 3):
        counts.add(token)
    logits = np.array([2.0, -2.0, 4.0, -4.0, 1.0], np.float32)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    changed = changed_logits(logits, params, counts=counts)
    assert_array_equal(
        changed, np.array([1.0, -4.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 1.0], np.float32)
    )


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([0.0, 5.0, 1.0, 5.0], np.float32)
    assert choose(logits, SamplingParams(), position=0).token == 1


def test_greedy_honours_biases_masks_and_penalties() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    assert choose(logits, SamplingParams(logit_bias={2: 5.0}), position=0).token == 2
    assert choose(logits, SamplingParams(logit_bias={0: -inf}), position=0).token == 1
    allowed = np.array([False, False, True])
    assert choose(logits, SamplingParams(), position=0, allowed=allowed).token == 2
    repeated = SamplingParams(repetition_penalty=4.0)
    assert choose(logits, repeated, position=0, counts=TokenCounts(3, [0])).token == 1


def test_a_bias_does_not_bring_back_what_the_mask_removed() -> None:
    logits = np.array([3.0, 2.0], np.float32)
    params = SamplingParams(logit_bias={0: 100.0})
    allowed = np.array([False, True])
    assert choose(logits, params, position=0, allowed=allowed).token == 1


def test_nothing_left_to_choose() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    with pytest.raises(NoTokenAllowedError, match="position 5"):
        choose(logits, SamplingParams(), position=5, allowed=np.zeros(2, bool))


def test_log_probabilities_are_those_of_the_model() -> None:
    """Whatever bias and temperature do to the choice."""
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, alternatives=2)
    choice = choose(logits, params, position=0)
    assert choice.token == 3
    assert choice.logprob is not None
    assert isclose(choice.logprob, log(0.1), rel_tol=1e-6)
    assert [one.token for one in choice.alternatives] == [0, 1]
    assert_allclose([one.logprob for one in choice.alternatives], [log(0.5), log(0.2)], rtol=1e-6)


def test_log_probabilities_are_only_there_when_asked_for() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    assert choose(logits, SamplingParams(), position=0).logprob is None
    only_chosen = choose(logits, SamplingParams(alternatives=0), position=0)
    assert only_chosen.logprob is not None
    assert only_chosen.alternatives == ()


def test_a_random_number_depends_on_seed_position_and_stream_alone() -> None:
    largest_seed = (1 << 64) - 1
    keys = [(seed, place, 0) for seed in (0, 1, largest_seed) for place in range(300)]
    keys += [(0, place, 1) for place in range(300)]
    found = [uniform(*key) for key in keys]
    assert len(set(found)) == len(keys)
    assert all(0 <= number < 1 for number in found)
    assert [uniform(*key) for key in reversed(keys)] == found[::-1]


def test_the_numbers_of_a_seed_do_not_change_between_versions() -> None:
    """A recorded result: the same seed gives the same text in a year."""
    assert [round(uniform(42, place), 12) for place in range(3)] == RECORDED


RECORDED = [0.820198147861, 0.132349486305, 0.034893410078]

logit_rows = arrays.arrays(
    np.float32,
    strategies.integers(1, 40),
    elements=strategies.one_of(
        strategies.integers(-240, 240).map(lambda eighths: eighths / 8),  # no near ties
        strategies.sampled_from([0.0, 1.0, -inf]),  # ties and removed tokens
    ),
).filter(lambda row: bool((row > -inf).any()))
rules = strategies.builds(
    SamplingParams,
    temperature=strategies.floats(0.05, 5),
    top_k=strategies.integers(0, 45),
    min_p=strategies.floats(0, 1),
    top_p=strategies.floats(0.01, 1),
)


@settings(max_examples=300, deadline=None)
@given(logits=logit_rows, params=rules)
def test_rules_keep_what_their_definitions_keep(logits: Array, params: SamplingParams) -> None:
    """The same distribution as the loops, but where a sum lies on a border within rounding."""
    found, expected = distribution(logits, params), exact(logits, params)
    if ((found > 0) == (expected > 0)).all():
        assert_allclose(found, expected, atol=1e-9)
        return
    differing = np.flatnonzero((found > 0) != (expected > 0))
    weights = np.exp((logits - logits.max()) / params.temperature)
    near_min = abs(weights[differing] - params.min_p) < 1e-6
    assert near_min.all() or (len(differing) == 1 and params.top_p < 1)


@settings(max_examples=200, deadline=None)
@given(logits=logit_rows, params=rules, seed=strategies.integers(0, (1 << 64) - 1))
def test_a_choice_is_one_of_the_kept_tokens(
    logits: Array, params: SamplingParams, seed: int
) -> None:
    ids, probabilities = kept_tokens(logits, params)
    assert isclose(probabilities.sum(), 1)
    assert (probabilities >= 0).all()
    if params.top_k:
        assert len(ids) <= params.top_k
    token = choose(logits, params, position=3, seed=seed).token
    assert token in ids
    assert choose(logits, params, position=3, seed=seed).token == token


@settings(max_examples=200, deadline=None)
@given(logits=logit_rows, params=rules, data=strategies.data())
def test_a_mask_is_a_smaller_vocabulary(
    logits: Array, params: SamplingParams, data: strategies.DataObject
) -> None:
    """Choosing with a mask is choosing from the allowed tokens alone."""
    possible = np.flatnonzero(logits > -inf)
    chosen = data.draw(strategies.sets(strategies.sampled_from(possible.tolist()), min_size=1))
    kept = sorted(chosen)
    allowed = np.zeros(len(logits), bool)
    allowed[kept] = True
    masked = choose(logits, params, position=0, seed=1, allowed=allowed).token
    assert masked == kept[choose(logits[kept], params, position=0, seed=1).token]


@settings(max_examples=200, deadline=None)
@given(values=logit_rows, count=strategies.integers(1, 45))
def test_largest_is_the_head_of_a_stable_sort(values: Array, count: int) -> None:
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    assert largest(values, count).tolist() == order[:count]


@settings(max_examples=200, deadline=None)
@given(
    weights=arrays.arrays(
        np.float64, strategies.integers(1, 3000), elements={"min_value": 1e-6, "max_value": 1.0}
    ),
    mass=strategies.floats(0.01, 0.999),
)
def test_a_nucleus_is_the_smallest_set_with_its_mass(weights: Array, mass: float) -> None:
    kept = nucleus(weights, mass)
    slack = 1e-9 * weights.sum()
    assert weights[kept].sum() >= mass * weights.sum() - slack
    smallest = weights[kept].min()
    assert weights[kept].sum() - smallest < mass * weights.sum() + slack
    others = np.delete(weights, kept)
    assert not len(others) or others.max() <= smallest


def test_log_probabilities_of_large_logits() -> None:
    logits = np.array([1e4, 1e4, -1e4, -inf], np.float32)
    assert_allclose(
        log_probabilities(logits, np.arange(4)), [log(0.5), log(0.5), -2e4 + log(0.5), -inf]
    )


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": nan},
        {"top_k": -1},
        {"top_k": 1 << 31},
        {"min_p": 1.5},
        {"top_p": 0.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": inf},
        {"frequency_penalty": nan},
        {"logit_bias": {3: inf}},
        {"logit_bias": {-1: 1.0}},
        {"seed": -1},
        {"seed": 1 << 64},
        {"alternatives": 21},
    ],
    ids=str,
)
def test_values_out_of_range(field: dict[str, Any]) -> None:
    with pytest.raises(GenerationOptionError, match=next(iter(field))):
        SamplingParams(**field)


@pytest.mark.parametrize("size", [300, 5_000, 70_000])
@pytest.mark.parametrize("count", [0, 1, 20, 64, 256])
def test_largest_of_a_large_vocabulary(size: int, count: int) -> None:
    """Groups narrow the search; logits with many ties, and with removed tokens."""
    values = np.random.default_rng(size).integers(-40, 40, size).astype(np.float32) / 8
    values[::3] = -inf
    order = np.argsort(-values, kind="stable")
    assert_array_equal(largest(values, count), order[:count])
    equal = np.zeros(size, np.float32)
    assert_array_equal(largest(equal, count), np.arange(count))


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 4.0])
def test_a_nucleus_of_logits_is_that_of_exact_weights(spread: float, temperature: float) -> None:
    """With many tokens in it and few, and with its end where a rough sum cannot tell."""
    logits = np.random.default_rng(1).normal(0, spread, 5_000).astype(np.float32)
    logits[::7] = -inf
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    sums = np.cumsum(np.sort(weights)[::-1])
    borders = [float(sums[place] / sums[-1]) for place in (0, 9, 200)]
    for mass in (0.01, 0.5, 0.9, 0.999, *(one for one in borders if one < 1)):
        found = nucleus_of_logits(logits, temperature, mass)
        assert_array_equal(found, nucleus(weights, mass))


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_a_draw_of_all_tokens_is_the_draw_of_exact_weights(spread: float) -> None:
    """Also at the borders of intervals, where rough sums cannot tell."""
    logits = np.random.default_rng(1).normal(0, spread, 20_000).astype(np.float32)
    logits[::7] = -inf
    for temperature in (1e-5, 0.7, 1.0, 4.0):
        ids, probabilities = kept_tokens(logits, SamplingParams(temperature=temperature))
        sums = np.cumsum(probabilities)
        borders = [float(one) for one in sums[np.argsort(-probabilities)[:20]] if one < 1]
        for number in (0.0, 1 - 2.0**-53, *borders, *numbers(3)[:50]):
            found = draw_of_all(logits, temperature, number)
            assert found in _near(ids, sums, number), (temperature, number)


def _near(ids: Array, sums: Array, number: float) -> list[int]:
    """The id whose interval has `number`; both where it is a border within rounding of f64."""
    slack = 1e-12
    ends = np.searchsorted(sums, [number - slack, number + slack], side="right")
    return [int(one) for one in ids[ends[0] : ends[1] + 1]]
