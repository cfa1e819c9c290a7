"""Reads the target files. They are part of mkc, so a malformed one is an internal error."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any
from typing import get_type_hints

from mkc.errors import UnknownTargetError
from mkc.targets.model import Core
from mkc.targets.model import Dma
from mkc.targets.model import Exchange
from mkc.targets.model import Hbm
from mkc.targets.model import Launch
from mkc.targets.model import Links
from mkc.targets.model import Mxu
from mkc.targets.model import Origin
from mkc.targets.model import OriginKind
from mkc.targets.model import Semaphores
from mkc.targets.model import Smem
from mkc.targets.model import Target
from mkc.targets.model import Topology
from mkc.targets.model import Vmem

SUFFIX = ".toml"
SECTIONS: dict[str, type[Any]] = {
    "core": Core,
    "vmem": Vmem,
    "smem": Smem,
    "semaphores": Semaphores,
    "hbm": Hbm,
    "dma": Dma,
    "mxu": Mxu,
    "exchange": Exchange,
    "links": Links,
    "launch": Launch,
}


@cache
def known_targets() -> tuple[str, ...]:
    """Names of the generations, sorted."""
    names = (entry.name for entry in files("mkc.targets").iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


@cache
def load_target(name: str) -> Target:
    """The target `GENERATION` or `GENERATION:TOPOLOGY`.

    Raises:
      UnknownTargetError: no such generation, or it has no such topology.
    """
    generation, colon, wanted = name.partition(":")
    if generation not in known_targets():
        raise UnknownTargetError(target=name, known=known_targets())
    text = files("mkc.targets").joinpath(generation + SUFFIX).read_text(encoding="utf-8")
    data = tomllib.loads(text)
    assert data["generation"] == generation, f"{generation}{SUFFIX} describes another generation"
    topologies = _topologies(data)
    topology = next((one for one in topologies if one.name == wanted), None)
    if colon and topology is None:
        raise UnknownTargetError(
            target=name,
            known=known_targets(),
            topologies=[one.name for one in topologies],
            of=generation,
        )
    return Target(
        generation=generation,
        device_kind=data["device_kind"],
        summary=data["summary"],
        topologies=topologies,
        topology=topology,
        tile_rows={int(size): entry["value"] for size, entry in data["tile_rows"].items()},
        origins=_origins(data),
        **{section: _section(data, section) for section in SECTIONS},
    )


def _topologies(data: dict[str, Any]) -> tuple[Topology, ...]:
    found = (
        Topology(generation=data["generation"], name=name, devices=entry["value"])
        for name, entry in data["topologies"].items()
    )
    return tuple(sorted(found, key=lambda one: (one.devices, one.name)))


def _section(data: dict[str, Any], section: str) -> Any:
    """One record; its keys must be exactly the fields, and integers stay integers."""
    record = SECTIONS[section]
    entries = data[section]
    expected = [one.name for one in fields(record)]
    place = f"{data['generation']}{SUFFIX} [{section}]"
    assert sorted(entries) == sorted(expected), f"{place}: expected the keys {expected}"
    types = get_type_hints(record)
    for key, entry in entries.items():
        assert type(entry["value"]) is types[key], f"{place} {key}: not {types[key].__name__}"
    return record(**{key: entry["value"] for key, entry in entries.items()})


def _origins(data: dict[str, Any]) -> dict[str, Origin]:
    origins = {}
    for section, entries in data.items():
        if not isinstance(entries, dict):
            continue
        for key, entry in entries.items():
            kind, _, note = entry["origin"].partition(":")
            origins[f"{section}.{key}"] = Origin(
                kind=OriginKind(kind), note=note.strip(), measured=entry["measured"]
            )
    return origins
