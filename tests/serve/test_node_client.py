"""The official Node client, where it is installed: `cd tests/serve/node && npm ci`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.running import SECONDS
from tests.serve.running import Running

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="there is no node")
@pytest.mark.skipif(
    not (FOLDER / "node_modules" / "openai").is_dir(), reason="the client is not installed"
)
def test_what_its_users_rely_on(tiny: Running) -> None:
    assert NODE is not None
    shown = subprocess.run(
        [NODE, str(FOLDER / "client.mjs"), tiny.url],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["models"] == ["tiny", "alias"]
    answers = ("answer", "streamed", "helper", "response", "responseStreamed")
    assert [found[name] for name in answers] == ["19"] * len(answers)
    assert found["finish"] == "stop"
    assert found["usage"] == found["expectedUsage"]
    assert found["error"] == {"kind": "BadRequestError", "status": 400, "param": "suffix"}
