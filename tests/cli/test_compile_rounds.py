"""`mkc compile --spec`: a model and a drafter become one kernel that runs whole rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mkc.cli.main import main
from mkc.hbm_plan import prefill_workspace
from mkc.passes.p10_shard import Shard
from mkc.prompt_blocks import block_sizes
from mkc.schedule.decisions import DecisionLog
from tests.draft_goldens import TARGET_CASE
from tests.draft_goldens import draft_case
from tests.draft_goldens import golden_round
from tests.goldens import golden_case


def test_a_round_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proved and simulated like any kernel."""
    target, draft, out = tmp_path / "target.json", tmp_path / "draft.json", tmp_path / "built"
    target.write_text(json.dumps(golden_case(TARGET_CASE).meta["config"]))
    draft.write_text(json.dumps(draft_case().meta["config"]))
    command = (
        f"mkc compile qwen38 --spec dflash2 --config {target} --draft {draft} --context 128 "
        f"--target tpu7x:1x1x1 --rounds-per-launch 4 --no-aot --quiet --out {out}"
    )
    monkeypatch.setattr("sys.argv", command.split())
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    report = json.loads((out / "report.json").read_text())
    assert (report["model"], report["scheme"], report["rows"]) == ("qwen38", "dflash2", 8)
    assert report["rounds_per_launch"] == 4
    assert report["proof"]["ok"]
    assert report["bytes"]["padding"] >= 0
    parts = {one["name"]: one["bytes"] for one in report["hbm"]["parts"]}
    shard = Shard(ranks=report["ranks"])
    prompts, rounds = (
        shard.apply(one, DecisionLog()).graph
        for one in (golden_round().prefill, golden_round().graph)
    )
    rows = block_sizes(128)[-1]
    wanted = prefill_workspace(prompts, rows)
    assert parts["prefill workspace"] == wanted < prefill_workspace(rounds, rows)
    assert "ROWS_PER_SEQUENCE = 8" in (out / "kernel.py").read_text()


def test_without_a_drafter_it_is_the_kernel_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--spec none` says what is the default."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_case(TARGET_CASE).meta["config"]))
    command = (
        f"mkc compile qwen38 --config {config} --target tpu7x:1x1x1 --context 128 --emit kernel"
    )
    texts = []
    for number, option in enumerate(("", " --spec none")):
        out = tmp_path / f"{number}.py"
        monkeypatch.setattr("sys.argv", f"{command}{option} --out {out}".split())
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "ROWS_PER_SEQUENCE" not in texts[0]
