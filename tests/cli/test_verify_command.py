"""`mkc verify` as a user sees it: a verdict per obligation, an edited kernel, exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mkc.cli.main import main
from mkc.schedule.verify import OBLIGATIONS

DECODER = f"{Path(__file__).with_name('small_model.py')}:decoder"
TABLE = 'role="table", shape=(2048, 256), dtype="bf16"'
OPTIONS = ("--context", "64", "--tp", "2")


@dataclass(frozen=True, kw_only=True)
class Done:
    """How the command ended: status, verdicts by name."""

    status: int
    verdicts: dict[str, dict[str, Any]]

    def statuses(self) -> dict[str, str]:
        return {name: one["status"] for name, one in self.verdicts.items()}


type Verify = Callable[..., Done]


@pytest.fixture
def verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Verify:
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Done:
        argv = ["mkc", "verify", DECODER, *OPTIONS, "--json", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        document = json.loads(capsys.readouterr().out)
        status = ended.value.code or 0
        assert isinstance(status, int)
        assert document["ok"] == (status == 0)
        return Done(status=status, verdicts={one["name"]: one for one in document["verdicts"]})

    return command


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The generated kernel, to be edited."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "plan"
    argv = ["mkc", "compile", DECODER, *OPTIONS, "--no-aot", "--quiet", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return folder / "kernel.py"


def edit(kernel: Path, old: str, new: str) -> None:
    text = kernel.read_text()
    assert old in text
    kernel.write_text(text.replace(old, new, 1))


def test_a_sound_model(verify: Verify) -> None:
    """Everything but the TPU compiler, which has its own tests."""
    done = verify("--no-aot")
    assert done.status == 0
    expected = dict.fromkeys([*OBLIGATIONS, "lint", "kernel", "traced lint", "races"], "holds")
    assert done.statuses() == {**expected, "TPU compiler": "skipped"}
    assert "the model itself" in done.verdicts["races"]["ground"]
    assert "the generated text" in done.verdicts["kernel"]["ground"]


def test_steps_can_be_left_out(verify: Verify) -> None:
    done = verify("--no-aot", "--no-races", "--no-trace")
    skipped = {name for name, status in done.statuses().items() if status == "skipped"}
    assert skipped == {"kernel", "races", "TPU compiler"}


def test_an_edited_kernel_of_the_same_order(verify: Verify, kernel: Path) -> None:
    """Other arithmetic: the schedule is still the proven one, and the verdict says what is not."""
    edit(kernel, "support.silu(", "support.sigmoid(")
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.statuses()["kernel"] == "holds"
    assert "an edited text; its arithmetic is not proven" in done.verdicts["kernel"]["ground"]
    assert done.statuses()["races"] == "skipped"


def test_an_edited_kernel_without_a_wait(verify: Verify, kernel: Path) -> None:
    text = kernel.read_text()
    line = next(one for one in text.split("\n") if "support.tape_wait(" in one)
    kernel.write_text(text.replace(line + "\n", "", 1))
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.status == 1
    verdict = done.verdicts["kernel"]
    assert verdict["status"] == "fails"
    assert "Not proven: that readers find what they mean" in verdict["ground"]
    assert "V201" in {one["code"] for one in verdict["issues"]}


def test_an_edited_kernel_without_its_barrier(verify: Verify, kernel: Path) -> None:
    edit(kernel, "    support.entry_barrier(RANKS)\n", "")
    issues = verify("--kernel", str(kernel), "--no-aot").verdicts["kernel"]["issues"]
    assert "V601" in {one["code"] for one in issues}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            '("tape_ring", "bf16", (4,',
            '("tape_ring", "bf16", (3,',
            "scratch tape_ring: expected (4, 512, 256) bf16, found (3, 512, 256) bf16",
        ),
        (
            '("tape_sems", "dma", (4,))',
            '("tape_sems", "dma", (3,))',
            "expected (4,) dma, found (3,)",
        ),
        (
            "shape=(1536, 256)",
            "shape=(768, 256)",
            "expected (1536, 256) bf16 tape, found (768, 256)",
        ),
        (f"{TABLE})", f"{TABLE}, updated=True)", "found (2048, 256) bf16 table, updated"),
        (
            "vmem_limit_bytes=67108864",
            "vmem_limit_bytes=1024",
            "vmem_limit_bytes: expected 67108864",
        ),
        (
            "build(kernel, SPEC, mesh,",
            "build(step, SPEC, mesh,",
            "build() is not the generated one",
        ),
    ],
)
def test_an_edited_kernel_with_other_arrays(
    verify: Verify, kernel: Path, old: str, new: str, told: str
) -> None:
    """The proof is about the generated shapes, counts and limits; nothing is traced then."""
    edit(kernel, old, new)
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.status == 1
    assert done.statuses()["kernel"] == "fails"
    assert told in done.verdicts["kernel"]["ground"]


def test_an_edited_kernel_with_a_wait_in_some_launches(verify: Verify, kernel: Path) -> None:
    """No launch that is traced begins at position 7, where this one waits for ever."""
    barrier = "    support.entry_barrier(RANKS)\n"
    wait = "lambda: support.tape_wait(m.tape, c.tape, 256)"
    edit(kernel, barrier, f"{barrier}    lax.cond(m.positions[0] == 7, {wait}, lambda: None)\n")
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.status == 1
    verdict = done.verdicts["kernel"]
    assert verdict["status"] == "fails"
    assert "the generated kernel does not decide by eq(get(" in verdict["ground"]
    assert verdict["issues"] == []


def test_an_edited_kernel_with_a_wait_in_a_traced_launch(verify: Verify, kernel: Path) -> None:
    """All kinds of launches are traced: in one every sequence rests."""
    barrier = "    support.entry_barrier(RANKS)\n"
    wait = "lambda: support.tape_wait(m.tape, c.tape, 256)"
    edit(kernel, barrier, f"{barrier}    lax.cond(m.positions[0] < 0, {wait}, lambda: None)\n")
    verdict = verify("--kernel", str(kernel), "--no-aot").verdicts["kernel"]
    assert verdict["status"] == "fails"
    assert "in the launch 'all rest'" in verdict["ground"]
    assert "V102" in {one["code"] for one in verdict["issues"]}


def test_a_harmless_edit_of_the_order(verify: Verify, kernel: Path) -> None:
    """Vectors are waited for later, still before they are read; both ranks exchange as before."""
    wait, embed = "    support.stream_wait(m.page_top, c.page_top)\n", "    c = p00_embed(m, c)\n"
    edit(kernel, wait + embed, embed + wait)
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.status == 0
    assert done.statuses()["kernel"] == "skipped"
    assert done.verdicts["kernel"]["issues"] == []


BARRIER = "    support.entry_barrier(RANKS)\n"
STORE = "    support.store_tokens(index, m.next_token, BATCH)\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def step(m):", "# nothing is changed\n\n\ndef step(m):"),
        ("    silu = support.round_bf16(support.silu(up))\n", "\n    silu = support.silu(up)\n"),
        ("m.tape.ring[c.tape.slot,", "m.tape.ring[(c.tape.slot + 4) % 4,"),
    ],
    ids=["comment", "arithmetic", "the same slot"],
)
def test_edits_that_touch_the_same(verify: Verify, kernel: Path, old: str, new: str) -> None:
    edit(kernel, old, new)
    assert verify("--kernel", str(kernel), "--no-aot").statuses()["kernel"] == "holds"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "m.v_down[:, 0:256] = jnp.broadcast_to(support.round_bf16(total), (ROWS, 256))",
            "m.v_down[0:4, 0:256] = jnp.broadcast_to(support.round_bf16(total), (4, 256))",
            "it writes region_",
        ),
        (STORE, "", "it does not write next_token"),
        (BARRIER, f"{BARRIER}    m.tokens[0] = 0\n", "it writes tokens 0 0"),
        (BARRIER, f"{BARRIER}    m.positions[0] = m.positions[0] + 1\n", "it writes positions 0"),
    ],
    ids=["other rows", "no result", "other tokens", "other positions"],
)
def test_edits_that_touch_something_else(
    verify: Verify, kernel: Path, old: str, new: str, told: str
) -> None:
    """No copy or wait is another, and still the proof is not one of this file."""
    edit(kernel, old, new)
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.statuses()["kernel"] == "skipped"
    assert told in done.verdicts["kernel"]["ground"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "pltpu.store(m.region_0.at[0:8, 0:128], jnp.zeros((8, 128)), "
            "mask=jnp.ones((8, 128), bool))",
            "what the primitive masked_swap does is not followed",
        ),
        (
            "m.region_0.reshape(16, m.region_0.shape[1] // 2)[...] = "
            "jnp.zeros((16, m.region_0.shape[1] // 2))",
            "region_0 is taken in another shape or type",
        ),
    ],
    ids=["masked store", "another shape"],
)
def test_edits_that_cannot_be_followed(verify: Verify, kernel: Path, line: str, told: str) -> None:
    edit(kernel, BARRIER, f"{BARRIER}    {line}\n")
    edit(
        kernel,
        "import jax.numpy",
        "from jax.experimental.pallas import tpu as pltpu\nimport jax.numpy",
    )
    verdict = verify("--kernel", str(kernel), "--no-aot").verdicts["kernel"]
    assert verdict["status"] == "fails"
    assert told in verdict["ground"]


def test_an_edited_kernel_with_one_semaphore_for_both_ways(verify: Verify, kernel: Path) -> None:
    """The wait for the message of the other rank may end because the own one has left."""
    edit(
        kernel,
        "send_sem=m.exchange_one_shot_256_0_sems.at[0]",
        "send_sem=m.exchange_one_shot_256_0_sems.at[1]",
    )
    issues = verify("--kernel", str(kernel), "--no-aot").verdicts["kernel"]["issues"]
    assert "V603" in {one["code"] for one in issues}


def test_the_proof_is_not_about_an_edited_kernel(verify: Verify, kernel: Path) -> None:
    for arguments in ([], ["--kernel", str(kernel)]):
        done = verify(*arguments, "--no-aot", "--no-races", "--no-trace")
        grounds = [done.verdicts[name]["ground"] for name in OBLIGATIONS]
        assert {"of the generated program" in one for one in grounds} == {bool(arguments)}


def test_an_edited_kernel_that_is_not_python(verify: Verify, kernel: Path) -> None:
    kernel.write_text(kernel.read_text() + "\ndef broken(:\n")
    done = verify("--kernel", str(kernel), "--no-aot")
    assert done.statuses()["lint"] == "fails"
    assert done.statuses()["kernel"] == "fails"
    assert "does not trace (SyntaxError" in done.verdicts["kernel"]["ground"]


def test_text_for_people(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    argv = ["mkc", "verify", DECODER, *OPTIONS, "--no-aot", "--no-races", "--no-trace"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code
    assert [line.split()[0] for line in lines[: len(OBLIGATIONS)]] == list(OBLIGATIONS)
    assert all(" holds " in line for line in lines[: len(OBLIGATIONS)])
    assert lines[-1].startswith("TPU compiler")
