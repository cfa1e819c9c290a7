"""What a checkpoint asks for in `generation_config.json`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

import pytest

from mkc.errors import GenerationOptionError
from mkc.errors import TokenizerFileError
from mkc.runtime.generation_config import FILE
from mkc.runtime.generation_config import default_sampling
from mkc.runtime.sampling import SamplingParams


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, SamplingParams()),
        ({"temperature": 0.7, "top_k": 20}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
    ],
    ids=["no file", "greedy", "plain sampling", "all rules", "penalty"],
)
def test_defaults(tmp_path: Path, config: dict[str, Any] | None, expected: SamplingParams) -> None:
    if config is not None:
        (tmp_path / FILE).write_text(dumps(config))
    assert default_sampling(tmp_path) == expected


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(TokenizerFileError, match=FILE):
        default_sampling(tmp_path)
    (tmp_path / FILE).write_text(dumps({"do_sample": True, "top_p": 2}))
    with pytest.raises(GenerationOptionError, match="top_p"):
        default_sampling(tmp_path)
