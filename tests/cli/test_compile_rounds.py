"""`mkc compile --spec`: a model and a drafter become one kernel that runs whole rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mkc.cli.main import main
from tests.draft_goldens import TARGET_CASE
from tests.draft_goldens import draft_case
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
    assert "ROWS_PER_SEQUENCE = 8" in (out / "kernel.py").read_text()
