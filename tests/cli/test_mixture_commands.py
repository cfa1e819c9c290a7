"""Commands on a folder of a model with experts in MXFP4, with the kernel in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from mkc.cli.main import app
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from models.kimi_k3 import MODEL
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_config
from tests.runtime.text.checkpoints import byte_level_checkpoint

END = 3
TASK = {"messages": [{"role": "user", "content": "12 + 7"}], "check": "contains", "answer": "19"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with random weights; the config alone says which family they are of."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    folder.mkdir()
    config = small_config(layers=2, latent=[2], dense=1, mxfp4=True)
    config["text_config"] |= {"vocab_size": 512, "attn_res_block_size": 1, "eos_token_id": END}
    config["eos_token_id"] = END
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(kimi_weights(MODEL.trace(config, batch=1, context=128), 1, heads=8), folder / SINGLE)
    byte_level_checkpoint(folder)
    return folder


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.long
def test_pack_run_bench_and_eval(mixture: Path, tmp_path: Path) -> None:
    """Both backends say the same; what a model with random weights says is of no interest."""
    target, packed = ["--target", "tpu7x:1x1x1", "--tp", "1"], str(tmp_path / "packed")
    invoke("pack", "kimi_k3", "--weights", str(mixture), *target, "--out", packed)
    kernel = ["--backend", "interpret", *target, "--packed", packed]
    asked = ["-p", "hello", "--raw", "--weights", str(mixture), "--context", "64", "--json"]
    asked += ["--max-tokens", "6"]
    found = [
        json.loads(invoke("run", *asked, *options))["tokens"]
        for options in (kernel, ["--backend", "reference"])
    ]
    assert len(found[0]) > 1
    assert found[0] == found[1]
    sizes = ["--context", "64", "--batch", "1", "--prompt-tokens", "8", "--output-tokens", "3"]
    measured = json.loads(invoke("bench", str(mixture), *sizes, *kernel, "--json"))
    assert measured["runs"][0]["rounds"] == 2
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "one", "task": "sums", **TASK}))
    counted = ["--context", "128", "--max-tokens", "4", "--json"]
    answered = json.loads(invoke("eval", str(mixture), str(tasks), *counted, *kernel))
    assert "sums" in json.dumps(answered)
