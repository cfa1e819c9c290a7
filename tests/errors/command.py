"""The `mkc` command as a user meets it: what it prints, its exit status, what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from mkc.cli.main import main
from mkc.errors import MkcError

USER_ERROR = 2  # exit status


@dataclass(frozen=True, kw_only=True)
class Command:
    """Runs the command in this process, in an empty working directory."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def refused(self, error: type[MkcError], *fragments: str, argv: str) -> str:
        """`mkc argv` prints one message for `error`, leaves with status 2, and leaves no file.

        Returns:
          the message.
        """
        before = sorted(self.folder.rglob("*"))
        self.monkeypatch.setattr("sys.argv", ["mkc", *argv.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = self.capsys.readouterr()
        assert stopped.value.code == USER_ERROR
        assert printed.out == ""
        assert printed.err.startswith(f"error[{error.code}]: ")
        assert "Traceback" not in printed.err
        for fragment in fragments:
            assert fragment in printed.err, f"{fragment!r} is not in: {printed.err}"
        assert sorted(self.folder.rglob("*")) == before
        return printed.err


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # the user's file leaves no cache
    return Command(folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
