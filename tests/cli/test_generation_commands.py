"""`mkc run` and `mkc chat` on a checkpoint folder with a tokenizer and a template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result

from mkc.cli import generation
from mkc.cli.main import app
from mkc.errors import ChatTemplateError
from mkc.errors import ConfigValueError
from mkc.errors import PromptLengthError
from mkc.errors import UnknownModelError
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from tests.cli.answers import CONTEXT
from tests.cli.answers import Answers
from tests.goldens import golden_case


def invoke(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--context", str(CONTEXT)], input=stdin)


@pytest.fixture
def answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers(folder, "so so\n</think>\n\n12 + 7 = 19<|end|>")
    monkeypatch.setattr(generation, "open_backend", found.opened)
    return found


def test_run_prints_the_answer_and_says_what_runs(folder: Path, answers: Answers) -> None:
    result = invoke("run", "-p", "12 + 7", "--weights", str(folder), "--stats")
    assert result.exit_code == 0, result.output
    assert result.stdout == "12 + 7 = 19\n"
    assert "mkc: no model" in result.stderr
    assert "warning: tensor 'bad.w'" in result.stderr
    assert "tokens/s" in result.stderr
    assert answers.prompts == ["<|turn|>user\n12 + 7<|end|>\n<|turn|>assistant\n<think>\n"]


def test_run_raw_continues_text(folder: Path, answers: Answers) -> None:
    result = invoke("run", "-p", "12 + 7", "--weights", str(folder), "--raw", "--quiet")
    assert answers.prompts == ["12 + 7"]
    assert result.stdout == "so so\n</think>\n\n12 + 7 = 19\n"
    assert "no model" not in result.stderr


def test_run_json(folder: Path, answers: Answers) -> None:
    result = invoke("run", "-p", "12 + 7", "--weights", str(folder), "--json", "--stop", "9")
    found = json.loads(result.stdout)
    assert found["text"] == "12 + 7 = 1"
    assert found["reasoning"].strip() == "so so"
    assert (found["finish_reason"], found["stop"]) == ("stop", "9")
    assert found["statistics"]["output_tokens"] == len(found["tokens"])


def test_run_takes_its_sampling_from_the_checkpoint(
    folder: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    add = Generator.add

    def noted(self: Generator, request: Request) -> int:
        seen.append(request.sampling)
        return add(self, request)

    monkeypatch.setattr(Generator, "add", noted)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 20}))
    try:
        invoke("run", "-p", "a", "--weights", str(folder), "--top-k", "5", "--seed", "3")
    finally:
        file.unlink()
    invoke("run", "-p", "a", "--weights", str(folder))
    assert [(one.temperature, one.top_k, one.seed) for one in seen] == [(0.7, 5, 3), (0.0, 0, None)]


def test_run_refuses_a_prompt_that_is_too_long(folder: Path, answers: Answers) -> None:
    result = invoke("run", "-p", "the cat " * CONTEXT, "--weights", str(folder), "--raw")
    assert isinstance(result.exception, PromptLengthError)
    assert str(CONTEXT) in result.exception.message


def test_run_without_a_template_asks_for_raw(
    folder: Path, answers: Answers, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    result = invoke("run", "-p", "12", "--weights", str(bare))
    assert isinstance(result.exception, ChatTemplateError)
    assert invoke("run", "-p", "12", "--weights", str(bare), "--raw").exit_code == 0


def test_interrupted_run_leaves_with_the_status_of_shells(folder: Path, answers: Answers) -> None:
    answers.interrupt = 3
    result = invoke("run", "-p", "12", "--weights", str(folder), "--raw")
    assert result.exit_code == 130
    assert answers.slots == [[]], "the slot is free again"


def test_chat_remembers_until_it_is_reset(folder: Path, answers: Answers) -> None:
    lines = "the cat\n\nand the mat\n/reset\nagain\n/exit\nnever\n"
    result = invoke("chat", str(folder), "--system", "short", stdin=lines)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("12 + 7 = 19") == 3
    first, second, third = answers.prompts
    assert "the cat" in first
    assert "the cat" in second
    assert "12 + 7 = 19" in second
    assert "the cat" not in third
    assert "short" in third


def test_chat_commands(folder: Path, answers: Answers) -> None:
    result = invoke("chat", str(folder), stdin="/stats\nhi\n/stats\n/draft off\n/what\n/help\n")
    assert result.exit_code == 0, result.output
    assert "no model" in result.stdout
    assert "0 tokens answered" in result.stdout
    assert "first token after" in result.stdout
    assert "rounds of" in result.stdout
    assert "(no draft)" in result.stdout
    assert "no drafter is loaded" in result.stdout
    assert "no command /what" in result.stdout
    assert result.stdout.count("/reset") == 2
    assert len(answers.prompts) == 1, "commands are not for the model"


def test_chat_goes_on_after_an_interrupt_and_after_an_error(folder: Path, answers: Answers) -> None:
    answers.interrupt = 8
    text = "the cat " * CONTEXT
    result = invoke("chat", str(folder), stdin=f"first\n{text}\nlast\n")
    assert result.exit_code == 0, result.output
    assert "error[E330]" in result.stderr
    assert result.stderr.count("/reset forgets it") == 1
    assert len(answers.prompts) == 2
    assert "first" in answers.prompts[1], "an interrupted answer stays"
    assert "cat" not in answers.prompts[1], "a refused question does not"


def test_chat_does_not_offer_to_forget_nothing(folder: Path, answers: Answers) -> None:
    """Where the first question alone is too long, `/reset` would not help."""
    text = "the cat " * CONTEXT
    result = invoke("chat", str(folder), "--system", "short", stdin=f"{text}\n/reset\n{text}\n")
    assert result.stderr.count("error[E330]") == 2
    assert "/reset forgets it" not in result.stderr
    assert answers.prompts == []


def test_the_model_is_found_by_the_config() -> None:
    assert generation.model_of(golden_case("qwen38_lane").meta["config"]) == "qwen38"
    with pytest.raises(UnknownModelError, match="unheard"):
        generation.model_of({"model_type": "unheard"})


@pytest.mark.long
def test_backends_say_the_same(folder: Path, tmp_path: Path) -> None:
    """The graph, the interpreted kernel, and the kernel with packed weights."""
    packed = str(tmp_path / "packed")
    pack = ["pack", "qwen38", "--weights", str(folder), "--target", "tpu7x", "--tp", "1"]
    assert CliRunner().invoke(app, [*pack, "--out", packed]).exit_code == 0
    found = []
    for options in (["reference"], ["interpret"], ["interpret", "--packed", packed]):
        run = ["run", "-p", "the cat sat", "--weights", str(folder), "--raw", "--json"]
        result = invoke(*run, "--max-tokens", "6", "--backend", *options)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    assert [one["backend"].split()[0] for one in found] == ["reference", "interpret", "interpret"]
    assert len(found[0]["tokens"]) == 6
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]
    assert found[0]["text"] == found[1]["text"] == found[2]["text"]


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({}, 4096),
        ({"max_position_embeddings": 100}, 96),
        ({"text_config": {"max_position_embeddings": 1 << 20}}, 4096),
        ({"max_position_embeddings": 8}, 16),
    ],
)
def test_default_context(config: dict[str, object], context: int) -> None:
    assert generation.default_context(config) == context


@pytest.mark.parametrize("limit", ["many", 0, True, float("inf"), None])
def test_a_config_without_a_usable_context(limit: object) -> None:
    with pytest.raises(ConfigValueError, match="'max_position_embeddings' is .* positive integer"):
        generation.default_context({"max_position_embeddings": limit})
