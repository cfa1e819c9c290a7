"""Golden weights as checkpoint folders, in every form that a checkpoint may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import INDEX
from mkc.runtime.checkpoint import SINGLE
from tests.goldens import Golden
from tests.goldens import golden_case

type Weights = Mapping[str, NDArray[Any]]

SHARDS = 3


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Ways to store the same tensors."""

    SINGLE = "one file"
    SHARDED = "files with an index"
    UNINDEXED = "files without an index"


FORMS = (Forms.SINGLE, Forms.SHARDED, Forms.UNINDEXED)


def write_checkpoint(
    folder: Path,
    name: str | Golden,
    *,
    weights: Weights | None = None,
    form: str = Forms.SINGLE,
) -> Path:
    """Writes a golden case, or other weights with its config, as a Hugging Face folder."""
    case = golden_case(name) if isinstance(name, str) else name
    tensors = dict(case.weights() if weights is None else weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(case.meta["config"]))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    if form == Forms.SINGLE:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    placed = {}
    names = sorted(tensors)
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[number::SHARDS]
        save_file({one: tensors[one] for one in part}, folder / file)
        placed.update(dict.fromkeys(part, file))
    if form == Forms.SHARDED:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder
