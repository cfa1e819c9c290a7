"""`mkc chat` as a person uses it: keys, Ctrl-C, and the end."""

from __future__ import annotations

from pathlib import Path

from tests.cli.terminal import in_terminal

LEFT, UP, CONTROL_C, CONTROL_D = "\x1b[D", "\x1b[A", "\x03", "\x04"


def test_chat_in_a_terminal(folder: Path) -> None:
    with in_terminal(["-m", "tests.cli.chat_program", str(folder)]) as terminal:
        terminal.wait_for("> ")
        terminal.type(f"caX{LEFT}\x7ft the \n")  # the cursor before the X, backspace, "t the "
        terminal.wait_for("seven")
        terminal.wait_for("> ")
        terminal.type(f"{UP}mat\n")  # the line before, and more
        terminal.wait_for("three")
        terminal.type(CONTROL_C)
        terminal.wait_for("> ")
        assert "seven" not in terminal.seen.rpartition("three")[2], "the answer went on"
        terminal.type("/stats\n")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.wait_until_idle()
        terminal.type(CONTROL_C)  # nothing to end: the chat goes on
        terminal.wait_for("\n> ")
        terminal.type("/draft off\n")
        terminal.wait_for("no drafter")
        terminal.wait_for("> ")
        terminal.type(CONTROL_D)
        terminal.wait_for("asked:")
        assert terminal.wait_for_end() == 0
        asked = terminal.seen.rpartition("asked:")[2]
    assert asked.count("user") == 3, "one message, then two"
    assert "ct the X" in asked
    assert "ct the Xmat" in asked.replace("ct the X\\n", ""), asked
