"""Text of the small model: its tokenizer, its chat template, and rows of tokens to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Regex
from tokenizers import Tokenizer as BytePairEncoder
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from examples.tiny_tasks import TASKS
from examples.tiny_tasks import Exchange
from examples.tiny_tasks import draw
from examples.tiny_words import TOOLS
from mkc.runtime.text import Chat
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer

VOCAB = 768
END_OF_TURN = "<|im_end|>"
HIDDEN_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# Digits one by one, so that a number's tokens are its digits; words with the space before them.
PATTERN = r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+"
SAMPLE = 6000  # exchanges that the merges are learned from
THINKING = 0.8  # of the exchanges are with thoughts
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, kw_only=True)
class Markup:
    """What a conversation's tokens mean to training.

    Attributes:
      end: token that ends the assistant's turn.
      padding: token that no conversation has.
      opening: pieces of text, encoded one by one, in front of what the assistant says.
      prompted: what may follow them and is part of the prompt, in pieces, too.
      between: text between an answer and the next message.
    """

    end: str
    padding: str
    opening: tuple[str, ...]
    prompted: tuple[tuple[str, ...], ...]
    between: str


CHATML = Markup(
    end=END_OF_TURN,
    padding=HIDDEN_TOKENS[0],
    opening=("<|im_start|>", "assistant\n"),
    prompted=(("<think>", "\n"),),
    between="\n",
)

TEMPLATE = """\
{#- Each message is <|im_start|>ROLE, a line break, its text, <|im_end|>, a line break. -#}
{%- macro signature(function) -%}
{{ function.name }}(
{%- for key, value in ((function.parameters or {}).properties or {}).items() -%}
{{ '' if loop.first else ', ' }}{{ key }}: {{ value.type or 'string' }}
{%- endfor -%}
)
{%- endmacro -%}
{%- set first = messages[0] if messages else none -%}
{%- set system = first.content if first and first.role == 'system' else '' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' + system + ('\\n' if system and tools else '') }}
{%- if tools -%}
{{ 'Tools:' }}
{%- for tool in tools -%}
{{ '\\n' + signature(tool.function or tool) }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- set place = namespace(last_question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set place.last_question = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{#- Thoughts of earlier turns are left out. -#}
{%- if message.reasoning_content is defined and loop.index0 > place.last_question -%}
{{ '<think>\\n' + message.reasoning_content + '</think>\\n\\n' }}
{%- endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() -%}
{{ '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'user' -%}
{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role != 'system' -%}
{{ raise_exception('messages are of system, user, assistant and tool, not of ' + message.role) }}
{%- elif not loop.first -%}
{{ raise_exception('a system message has to be the first one') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is not defined or enable_thinking -%}
{{ '<think>\\n' }}
{%- endif -%}
{%- endif -%}
"""


def train_merges(texts: Iterator[str], size: int) -> BytePairEncoder:
    """A byte-level BPE of so many tokens, without special ones."""
    encoder = BytePairEncoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    return encoder


def write_text_files(folder: Path, seed: int) -> None:
    """Trains the tokenizer; writes it and the template. The same seed gives the same files."""
    encoder = train_merges(sample_texts(Random(seed)), VOCAB - len(HIDDEN_TOKENS) - len(TAGS))
    encoder.add_special_tokens([AddedToken(one, special=True) for one in HIDDEN_TOKENS])
    encoder.add_tokens([AddedToken(one, special=False, normalized=False) for one in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(encoder.to_str(pretty=True) + "\n", encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": 1024,
        "pad_token": HIDDEN_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def sample_texts(rng: Random) -> Iterator[str]:
    """Texts that the merges are learned from; all sides of the split look the same."""
    for _ in range(SAMPLE):
        exchange = TASKS[rng.choice(list(TASKS))](rng)
        for message in (*exchange.messages, exchange.answer):
            yield f"{message['role']}\n{message.get('content', '')}\n"
            for call in message.get("tool_calls", ()):
                for key, value in call["function"]["arguments"].items():
                    name = call["function"]["name"]
                    yield (
                        f"\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n"
                        "</function>\n"
                    )
        yield f"\n{exchange.thought}"
        yield "\n\n"
        yield f"system\n{SYSTEM}\nTools:"
        yield from (f"\n{name}({TOOLS[name].argument}: {TOOLS[name].kind})" for name in TOOLS)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Conversations, one a row, padded.

    Attributes:
      tokens: i32 [rows, length].
      learned: f32 [rows, length], 1 where the token is one that the model has to say.
      tasks: of each exchange; its row, and the places behind it and behind the one before.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.float32]
    tasks: tuple[tuple[str, int, int, int], ...]

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each token, -1 for padding: i32 [rows, length]."""
        place = np.arange(self.tokens.shape[1], dtype=np.int32)
        ends = np.zeros(len(self.tokens), np.int32)
        for _, row, _, stop in self.tasks:
            ends[row] = max(ends[row], stop)
        return np.where(place < ends[:, None], place, -1).astype(np.int32)


class Teacher:
    """Makes rows of conversations with the model's own template."""

    def __init__(self, folder: Path, markup: Markup = CHATML) -> None:
        self.tokenizer = load_tokenizer(folder, vocab=VOCAB)
        self.chat: Chat = load_chat(folder, self.tokenizer)
        self.markup = markup
        self._end = self.special(markup.end)
        self._opening = self._ids(markup.opening)
        self._prompted = [self._ids(one) for one in markup.prompted]

    def _ids(self, pieces: Sequence[str]) -> tuple[int, ...]:
        encode = self.tokenizer.encode
        return tuple(one for text in pieces for one in encode(text, allow_special=True))

    def special(self, text: str) -> int:
        (found,) = self.tokenizer.encode(text, allow_special=True)
        return found

    def rows(
        self,
        rng: Random,
        *,
        rows: int,
        length: int,
        weights: Mapping[str, float],
        held_out: bool = False,
    ) -> Rows:
        """Conversations of as many exchanges as fit.

        Args:
          weights: how often each task comes, in proportion.
          held_out: which side of the split the items are from.
        """
        tokens = np.full((rows, length), self.special(self.markup.padding), np.int32)
        learned = np.zeros((rows, length), np.float32)
        tasks: list[tuple[str, int, int, int]] = []
        for row in range(rows):
            used = 0
            for one in self.conversation(rng, weights, held_out=held_out):
                part = self._exchange_ids(rng, one) if isinstance(one, Exchange) else one
                if used + len(part) > length:
                    break
                end = used + len(part)
                tokens[row, used:end] = part
                if isinstance(one, Exchange):
                    learned[row, used:end] = self.learned(part)
                    tasks.append((one.task, row, used, end))
                used = end
        return Rows(tokens=tokens, learned=learned, tasks=tuple(tasks))

    def conversation(
        self, rng: Random, weights: Mapping[str, float], *, held_out: bool
    ) -> Iterator[Sequence[int] | Exchange]:
        """Ids of a heading, if there is one, and exchanges without end."""
        names, shares = list(weights), list(weights.values())
        first = draw(rng, rng.choices(names, shares)[0], held_out=held_out)
        system = rng.random() < 0.1
        if system or first.tools:
            messages = [{"role": "system", "content": SYSTEM}] if system else []
            yield self.encode(messages, tools=definitions(first.tools))
        yield first
        while True:
            task = rng.choices(names, shares)[0]
            following = draw(rng, task, held_out=held_out)
            if following.tools and set(following.tools) - set(first.tools):
                continue  # it needs other tools than those of this conversation
            yield following

    def question_ids(self, exchange: Exchange, *, thinking: bool) -> Sequence[int]:
        """Ids of an exchange up to where the answer begins."""
        return self.chat.encode(ChatRequest(messages=exchange.messages, thinking=thinking)).ids

    def _exchange_ids(self, rng: Random, exchange: Exchange) -> Sequence[int]:
        answer = exchange.answer
        thinking = rng.random() < THINKING
        if thinking:
            answer = {**answer, "reasoning_content": exchange.thought}
        return self.encode([*exchange.messages, answer], thinking=thinking)

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        thinking: bool | None = None,
    ) -> Sequence[int]:
        """Ids of whole messages."""
        request = ChatRequest(
            messages=messages, tools=tools, add_generation_prompt=False, thinking=thinking
        )
        return self.chat.encode(request).ids

    def learned(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """1 for each token of what the assistant says, the end of its turn included."""
        mask = np.zeros(len(ids), np.float32)
        inside = False
        place = 0

        def follows(wanted: tuple[int, ...]) -> bool:
            return tuple(ids[place : place + len(wanted)]) == wanted

        while place < len(ids):
            if not inside and follows(self._opening):
                inside = True
                place += len(self._opening)
                place += next((len(one) for one in self._prompted if follows(one)), 0)
                continue
            mask[place] = inside
            inside = inside and ids[place] != self._end
            place += 1
        return mask


def definitions(names: Sequence[str]) -> list[dict[str, Any]]:
    """Tools in the form of the chat completions interface."""
    return [TOOLS[name].definition(name) for name in names]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
