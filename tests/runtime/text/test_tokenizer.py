"""Text to ids and back, with both kinds of vocabulary."""

from __future__ import annotations

from itertools import pairwise
from json import loads
from pathlib import Path
from re import findall
from threading import Event
from threading import Thread
from time import perf_counter
from time import sleep

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline
from tokenizers.processors import TemplateProcessing

import mkc.runtime.text.ranked as ranked_module
from mkc.runtime.text import Tokenizer
from mkc.runtime.text import load_tokenizer
from mkc.runtime.text.byte_level import byte_of_character
from mkc.runtime.text.ranked import LONGEST_RUN
from mkc.runtime.text.ranked import cuts
from mkc.runtime.text.ranked import too_long
from tests.runtime.text.checkpoints import HIDDEN
from tests.runtime.text.checkpoints import MARKERS
from tests.runtime.text.checkpoints import TAGS
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.runtime.text.checkpoints import ranked_checkpoint
from tests.runtime.text.checkpoints import train_pipeline
from tests.runtime.text.checkpoints import write_json

SPECIALS = (*HIDDEN, *TAGS, *MARKERS)
# Text in which special tokens, pieces of them and ordinary text follow each other.
PIECES = st.sampled_from([*SPECIALS, "<|", "|>", "<", "think", ">", " ", "\n", "the cat", "早上"])
MIXED = st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join)


@given(text=MIXED)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text
    assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == text


@given(text=MIXED)
def test_text_of_users_never_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert not tokenizer.special_ids & set(ids)


@given(text=MIXED)
def test_markup_is_encoded_as_the_tokenizers_package_does(
    byte_level: Tokenizer, pipeline: Pipeline, text: str
) -> None:
    ids = byte_level.encode(text, allow_special=True)
    assert ids == pipeline.encode(text, add_special_tokens=False).ids


@given(text=MIXED)
def test_decoding_is_that_of_the_tokenizers_package(
    byte_level: Tokenizer, pipeline: Pipeline, text: str
) -> None:
    ids = pipeline.encode(text, add_special_tokens=False).ids
    assert byte_level.decode(ids) == pipeline.decode(ids, skip_special_tokens=False)
    assert byte_level.decode(ids, show_special=False) == pipeline.decode(ids)


def test_special_tokens_are_ids_only_where_markup_is_allowed(byte_level: Tokenizer) -> None:
    turn = byte_level.special_tokens["<|turn|>"]
    assert byte_level.encode("<|turn|>the", allow_special=True)[0] == turn
    assert turn not in byte_level.encode("<|turn|>the", allow_special=False)


def test_tags_are_shown_and_turn_markers_are_not(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<think>the</think><|end|>", allow_special=True)
    assert byte_level.decode(ids, show_special=False) == "<think>the</think>"


def test_an_added_token_that_is_text_stays_a_token_of_text(tmp_path: Path) -> None:
    pipeline = train_pipeline(tags=[*TAGS, "\t\t\t"])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a\t\t\tb", allow_special=False)
    assert ids == pipeline.encode("a\t\t\tb").ids
    assert pipeline.token_to_id("\t\t\t") in ids
    assert tokenizer.decode(ids) == "a\t\t\tb"


def test_white_space_beside_a_token_may_belong_to_it(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    flags = {"content": "<|wide|>", "special": True, "lstrip": True, "rstrip": True}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"420": flags}})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a \n<|wide|>\n b", allow_special=True)
    assert ids == [*tokenizer.encode("a", allow_special=False), 420] + tokenizer.encode(
        "b", allow_special=False
    )


def test_a_whole_word_of_the_vocabulary_is_no_way_around(tmp_path: Path) -> None:
    """`ignore_merges` takes a piece of text that is a word of the vocabulary as it is."""
    pipeline = train_pipeline(specials=["stop"], tags=[])
    description = pipeline.to_str().replace('"ignore_merges":false', '"ignore_merges":true')
    description = description.replace('"vocab":{', '"vocab":{"stop":400,')
    assert '"ignore_merges":true' in description
    (tmp_path / "tokenizer.json").write_text(description, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("stop", allow_special=True) == [400]
    assert 400 not in tokenizer.encode("stop", allow_special=False)


def test_ids_that_stop_are_gathered_from_all_files(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)  # tokenizer_config.json says <|end|>
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [401, 402]})
    write_json(tmp_path / "config.json", {"eos_token_id": 7, "text_config": {"eos_token_id": 8}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stop_ids == {401, 402, 7, 8, tokenizer.special_tokens["<|end|>"]}


@pytest.mark.parametrize("config", [{"vocab_size": 512}, {"text_config": {"vocab_size": 512}}])
def test_padding_of_the_embedding_is_decodable(tmp_path: Path, config: dict[str, object]) -> None:
    ranked_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_bytes(511) == b""


def test_ids_without_a_token_are_known(tmp_path: Path) -> None:
    """Between others: padding is none of them."""
    byte_level_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", {"vocab_size": 512})
    whole = load_tokenizer(tmp_path)
    assert (whole.tokens, whole.holes) == (407, ())
    file = tmp_path / "tokenizer.json"
    description = loads(file.read_text(encoding="utf-8"))
    used = {one for merge in description["model"]["merges"] for one in merge}
    vocab = description["model"]["vocab"]
    leaves = sorted(token for text, token in vocab.items() if text not in used and token > 255)
    removed = leaves[:2]
    texts = {text for text, token in vocab.items() if token in removed}
    description["model"]["vocab"] = {text: vocab[text] for text in vocab if text not in texts}
    description["model"]["merges"] = [
        one for one in description["model"]["merges"] if "".join(one) not in texts
    ]
    write_json(file, description)
    holed = load_tokenizer(tmp_path)
    assert (holed.tokens, holed.holes) == (405, tuple(removed))
    assert holed.token_bytes(removed[0]) == b""
    assert holed.decode(holed.encode("the cat", allow_special=False)) == "the cat"


def test_free_slots_behind_the_ranks_are_special(ranked: Tokenizer) -> None:
    reserved = [text for text in ranked.special_tokens if text.startswith("<|reserved")]
    assert len(reserved) == 8 - len(MARKERS)
    assert ranked.encode(reserved[0], allow_special=True) == [ranked.special_tokens[reserved[0]]]


def test_ids_in_front_of_a_plain_prompt(tmp_path: Path) -> None:
    pipeline = train_pipeline()
    end = pipeline.token_to_id("<|end|>")
    pipeline.post_processor = TemplateProcessing(
        single="<|end|> $A", pair=None, special_tokens=[("<|end|>", end)]
    )
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.prefix_ids == (end,)
    assert end not in tokenizer.encode("the", allow_special=True)


def test_ids_in_front_of_a_plain_prompt_by_rank(tmp_path: Path) -> None:
    specials = ranked_checkpoint(
        tmp_path, settings={"add_bos_token": True, "bos_token": "<|open|>"}
    )
    assert load_tokenizer(tmp_path).prefix_ids == (specials["<|open|>"],)


def test_a_run_that_no_regular_expression_survives_is_cut(ranked: Tokenizer) -> None:
    text = " " * (40 * LONGEST_RUN) + "the"  # ends the process when it is not cut
    assert ranked.decode(ranked.encode(text, allow_special=False)) == text


@settings(max_examples=20)
@given(length=st.integers(LONGEST_RUN - 2, LONGEST_RUN + 2))
def test_shorter_runs_are_encoded_whole(ranked: Tokenizer, length: int) -> None:
    ids = ranked.encode("  " * (length // 2), allow_special=False)
    assert len(ids) == (length // 2)


def test_runs_that_are_just_not_too_long_are_looked_at_once(ranked: Tokenizer) -> None:
    """Not from each of their places: that would take minutes."""
    text = "\n".join(["a" * (LONGEST_RUN - 1)] * 40)
    start = perf_counter()
    assert cuts(text) == []
    assert perf_counter() - start < 10


@given(text=st.text("ab \n", max_size=40), most=st.integers(1, 5))
def test_cuts_are_inside_of_runs(text: str, most: int) -> None:
    """No piece between two cuts has a longer run, and nothing else is cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_module, "LONGEST_RUN", most)
        patch.setattr(ranked_module, "TOO_LONG", too_long(most))
        found = [0, *cuts(text), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(found)]
    assert "".join(pieces) == text
    for piece in pieces:
        assert max(map(len, findall(r"\s+|\S+", piece)), default=0) <= most
    for piece in pieces[:-1]:
        assert len(findall(r"\s+|\S+", piece)[-1]) == most


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    """A server that reads a long prompt goes on with everything else."""
    turns, done = 0, Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            sleep(0.0001)

    other = Thread(target=count)
    other.start()
    before = turns
    tokenizer.encode("word 12 and more\n" * 20_000, allow_special=False)
    during = turns - before
    done.set()
    other.join()
    assert during > 10


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\ud800b", allow_special=False)
    assert tokenizer.decode(ids) == "a\ufffdb"


def test_every_byte_has_one_character() -> None:
    assert sorted(byte_of_character().values()) == list(range(256))
