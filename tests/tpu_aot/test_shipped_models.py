"""The TPU compiler accepts the rounds of the models that come with mkc.

Their rows are one tile of lanes wide, narrower than those of any other model here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mkc.cli.main import app
from mkc.cli.shipped import checkpoint_named


@pytest.mark.parametrize(
    ("name", "model", "scheme"),
    [
        ("tiny", "qwen38", "dflash2"),
        pytest.param("kimi-tiny", "kimi_k3", "dspark", marks=pytest.mark.long),
    ],
)
def test_rounds_of_a_shipped_model_compile(
    name: str, model: str, scheme: str, tmp_path: Path
) -> None:
    folder = checkpoint_named(name)
    parts = ["--config", folder, "--spec", scheme, "--draft", f"{folder}/drafter"]
    place = ["--target", "tpu7x:2x2x1", "--tp", "2", "--context", "256", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["compile", model, *parts, *place])
    assert result.exit_code == 0, result.output
    assert "accepted: 1 launch" in result.output
