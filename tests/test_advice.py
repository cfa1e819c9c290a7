"""Whoever follows the advice of a refusal, to the letter, is not refused again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from re import findall
from typing import Any

import pytest

from mkc.errors import ContextError
from mkc.errors import DeviceCountError
from mkc.errors import HbmError
from mkc.errors import MkcError
from mkc.errors import RoundsError
from mkc.errors import ShardingError
from mkc.errors import TileError
from mkc.errors import VmemError
from tests.errors.small_model import Sizes
from tests.errors.small_model import compile_small

WIDE_TABLES = Sizes(hidden=4096, vocab=1 << 20)  # 20 GiB
LONG_ROWS = Sizes(dim=1024)  # 32 KiB for each position
WIDE_ROWS = Sizes(hidden=393216, mlp=128, vocab=128, heads=1, kv_heads=1)
NARROW_MLP = Sizes(mlp=8 * 24)
NAMES = {"rounds-per-launch": "rounds"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Something that is refused."""

    error: type[MkcError]
    sizes: Sizes = field(default_factory=Sizes)
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.error.code}-{options}"


REFUSED = [
    Request(error=HbmError, sizes=WIDE_TABLES, options={"target": "v5e:1x1"}),
    Request(error=HbmError, sizes=WIDE_TABLES, options={"target": "v5e:2x4", "tp": 1}),
    Request(error=HbmError, sizes=LONG_ROWS, options={"target": "v5e:4x8", "context": 1 << 24}),
    Request(
        error=HbmError,
        sizes=LONG_ROWS,
        options={"target": "v5e:2x2", "batch": 8, "context": 1 << 22},
    ),
    Request(error=DeviceCountError, options={"target": "v6e:2x2", "tp": 8}),
    Request(error=DeviceCountError, options={"target": "v6e:2x2", "tp": 7}),
    Request(error=DeviceCountError, sizes=WIDE_TABLES, options={"target": "v5e:2x2", "tp": 16}),
    Request(error=ShardingError, options={"target": "v6e:2x4", "tp": 3}),
    Request(error=ShardingError, sizes=WIDE_TABLES, options={"target": "v5e:2x4", "tp": 3}),
    Request(error=TileError, sizes=NARROW_MLP, options={"target": "v6e:2x4"}),
    Request(error=VmemError, options={"passes": "residency{reserve_bytes=127MiB}"}),
    Request(error=VmemError, sizes=WIDE_ROWS, options={"batch": 8, "tp": 1}),
    Request(error=ContextError, options={"context": 1000}),
    Request(error=RoundsError, options={"rounds": 10**9}),
]


def advice_of(text: str) -> Iterator[dict[str, Any]]:
    """Every choice that a message gives, as options of `mkc compile`."""
    advice = text.split("too much. ")[-1].split("\nBuffers")[0]
    if "default options of the passes" in advice:
        yield {"passes": ""}
    if values := findall(r"(?:--tp|topology:) (\d+(?:, \d+)+)", advice):
        yield from ({"tp": int(one)} for one in values[0].split(", "))
    for name in findall(r"v\d[ep]:\dx\d", advice.partition("--target: ")[2]):
        yield {"target": name}
    if limit := findall(r"expected 1 to (\d+), so", advice):
        yield {"rounds": int(limit[0])}
    if context := findall(r"Use (\d+)\.", advice):
        yield {"context": int(context[0])}
    pairs = findall(r"--(\w+) ([\w:]+)(?=[ ,.]|$)", advice)
    if pairs and not values:
        yield {key: value if key == "target" else int(value) for key, value in pairs}


@pytest.mark.parametrize("request_", REFUSED, ids=str)
def test_following_the_advice(request_: Request) -> None:
    with pytest.raises(request_.error) as raised:
        compile_small(request_.sizes, **request_.options)
    choices = list(advice_of(str(raised.value)))
    assert choices, raised.value
    for choice in choices:
        assert compile_small(request_.sizes, **(request_.options | choice)).report, choice
