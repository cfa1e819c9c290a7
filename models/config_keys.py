"""Reads the keys of a config.json; what is missing or wrong is named."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import mkc

LARGEST_SIZE = 2**31 - 1  # positions and row numbers are i32
LARGEST_NUMBER = 3.4e38  # of an f32

type Config = Mapping[str, Any]
type Rule = tuple[str, str, object, tuple[object, ...]]  # feature, key, what it is, what it may be


def need(config: Config, key: str, expected: str) -> Any:
    """Raises `mkc.ConfigKeyError`, as do the others."""
    if key not in config:
        raise mkc.ConfigKeyError(key=key, expected=expected)
    return config[key]


def section(config: Config, key: str) -> Config:
    """An object in the config."""
    value = need(config, key, "an object")
    if not isinstance(value, Mapping):
        raise mkc.ConfigValueError(key=key, got=value, expected="an object")
    return value


def size(config: Config, key: str, *, least: int = 1) -> int:
    """An integer of at least `least`."""
    expected = f"an integer of at least {least}"
    value = need(config, key, expected)
    if type(value) is not int or not least <= value <= LARGEST_SIZE:
        if type(value) is int and value > LARGEST_SIZE:
            expected = f"{expected}, at most {LARGEST_SIZE}"
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    return value


def positive(config: Config, key: str) -> float:
    """A positive number."""
    expected = "a positive number that is finite in f32"
    value = need(config, key, expected)
    if type(value) not in (int, float) or not 0 < value < LARGEST_NUMBER:  # a NaN is in no range
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    return float(value)


def flag(config: Config, key: str) -> bool:
    """True or false."""
    value = need(config, key, "true or false")
    if not isinstance(value, bool):
        raise mkc.ConfigValueError(key=key, got=value, expected="true or false")
    return value


def numbers(config: Config, key: str, *, least: int, most: int) -> tuple[int, ...]:
    """A list of different integers from `least` to `most`."""
    expected = f"a list of different numbers from {least} to {most}"
    value = need(config, key, expected)
    fits = isinstance(value, list | tuple) and all(type(one) is int for one in value)
    if not fits or len(set(value)) < len(value) or any(not least <= n <= most for n in value):
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    return tuple(value)


def check_multiple(key: str, count: int, group_key: str, groups: int) -> None:
    """Refuses a `count` that `groups` does not divide."""
    if count % groups:
        expected = f"a multiple of {group_key}, which is {groups}"
        raise mkc.ConfigValueError(key=key, got=count, expected=expected)


def refuse_unsupported(rules: Iterable[Rule]) -> None:
    """Names the first feature that a config asks for and the model cannot do.

    Raises:
      mkc.UnsupportedFeatureError: the value of a rule is none of those that it may be.
    """
    for feature, key, got, supported in rules:
        if got not in supported:
            listed = " or ".join("no such key" if one is None else repr(one) for one in supported)
            raise mkc.UnsupportedFeatureError(feature=feature, key=key, got=got, supported=listed)
