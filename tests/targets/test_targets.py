"""Targets are data: known names, plain numbers, and an origin for each."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from mkc.errors import UnknownTargetError
from mkc.targets import OriginKind
from mkc.targets import known_targets
from mkc.targets import load_target

ALL = ("tpu7x", "v5e", "v5p", "v6e")
MIB = 1 << 20


def numbers(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every number of a target file by its dotted name, with the record it stands in."""
    found = {}
    for key, value in data.items():
        if isinstance(value, dict) and "value" not in value:
            found.update(numbers(value, f"{prefix}{key}."))
        elif not isinstance(value, str):
            found[prefix + key] = value
    return found


def test_four_generations_are_known() -> None:
    assert known_targets() == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_number_has_an_origin_and_is_not_called_measured(name: str) -> None:
    text = files("mkc.targets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    entries = numbers(tomllib.loads(text))
    origins = load_target(name).origins
    assert len(entries) > 40
    assert sorted(origins) == sorted(entries)
    for key, entry in entries.items():
        assert entry["measured"] is False, key
        assert origins[key].kind in OriginKind, key


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
def test_figures_published_for_one_generation_are_only_assumed_for_the_others(name: str) -> None:
    origins = load_target(name).origins
    assert origins["exchange.latency_us"].kind is OriginKind.ASSUMED
    assert origins["exchange.latency_us"].note == "from tpu7x"
    assert load_target("tpu7x").origins["exchange.latency_us"].kind is OriginKind.DERIVED


def test_the_topology_is_optional() -> None:
    assert load_target("tpu7x").topology is None
    assert load_target("tpu7x").name == "tpu7x"
    target = load_target("tpu7x:2x2x1")
    assert target.topology is not None
    assert target.topology.devices == 8
    assert target.name == "tpu7x:2x2x1"


def test_an_unknown_generation_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTargetError, match="tpu7x, v5e, v5p, v6e"):
        load_target("tpu9")


@pytest.mark.parametrize("name", ["tpu7x:9x9", "tpu7x:"])
def test_an_unknown_topology_lists_those_of_its_generation(name: str) -> None:
    with pytest.raises(UnknownTargetError, match="1x1x1, 2x2x1, 2x2x2, 2x2x4, 4x4x1"):
        load_target(name)


def test_the_smallest_topology_holds_the_bytes() -> None:
    target = load_target("v6e")
    one_device = target.hbm.usable_bytes
    assert [
        topology.name if (topology := target.smallest_topology(size)) else None
        for size in (one_device, one_device + 1, 8 * one_device, 33 * one_device)
    ] == ["1x1", "2x2", "2x4", None]


def test_the_compiler_keeps_part_of_vmem() -> None:
    vmem = load_target("tpu7x").vmem
    assert vmem.total_bytes - vmem.usable_bytes == 64 * 1024
    assert vmem.usable_bytes - vmem.limit_bytes == 3 * MIB


@pytest.mark.parametrize(
    ("shape", "element_bytes", "padded"),
    [
        ((8, 128), 4, 8 * 128 * 4),
        ((1, 128), 4, 8 * 128 * 4),
        ((2, 8, 1, 5120), 4, 2 * 8 * 8 * 5120 * 4),
        ((1, 129), 2, 16 * 256 * 2),
        ((33, 128), 1, 64 * 128),
        ((5,), 4, 8 * 128 * 4),
    ],
)
def test_vmem_arrays_are_padded_to_tiles(
    shape: tuple[int, ...], element_bytes: int, padded: int
) -> None:
    assert load_target("tpu7x").padded_bytes(shape, element_bytes) == padded


def test_a_ring_streams_at_full_rate_when_enough_is_in_flight() -> None:
    target = load_target("tpu7x")
    full = target.hbm.sustained_bytes_per_us
    assert target.stream_bytes_per_us(target.dma.saturation_bytes_in_flight) == full
    assert target.stream_bytes_per_us(2 * MIB) == pytest.approx(2_167_000, rel=0.01)


def test_the_exchange_law_gives_the_published_time_of_one_row() -> None:
    # one f32 row of 5120 sent to seven peers: 4.15 us published, the sum included
    assert load_target("tpu7x").exchange_us(5120 * 4, 7) == pytest.approx(4.15, rel=0.01)


def test_messages_beyond_those_that_were_fitted_cost_their_issue() -> None:
    target = load_target("tpu7x")
    further = target.exchange_us(512, 31) - target.exchange_us(512, 7)
    egress_us = 24 * 512 / target.exchange.egress_bytes_per_us
    assert further == pytest.approx(24 * target.links.issue_us + egress_us)


LIST_DEVICES = """
from jax.experimental import topologies
import sys
for name in sys.argv[1:]:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    print(name, len(devices), devices[0].device_kind, sep="|")
"""


def test_the_tpu_compiler_knows_every_topology() -> None:
    targets = [load_target(name) for name in ALL]
    expected = [
        f"{topology.full_name}|{topology.devices}|{target.device_kind}"
        for target in targets
        for topology in target.topologies
    ]
    names = [line.partition("|")[0] for line in expected]
    child = subprocess.run(
        [sys.executable, "-c", LIST_DEVICES, *names],
        env={**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.splitlines() == expected
