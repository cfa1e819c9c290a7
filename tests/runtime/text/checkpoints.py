"""Small checkpoints with tokenizers of every kind, made here: a few hundred tokens each."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Regex
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "the cat sat on the mat and thought about the weather in the city",
    "import numpy\n\nfor item in range(100):\n    print(item)\n",
    "Grüße aus Köln, café, naïve, 12 + 7 = 19",
    "早上好，世界。안녕하세요 🙂👍🏽",
    "user assistant system tool think response argument call message",
]
HIDDEN = ("<|end|>", "<|turn|>", "<|stop|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|done|>")

# Turns, tools, thoughts in the history, an open thought at the end: what real templates do.
TEMPLATE = """\
{%- if tools %}
    {{- '<|turn|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- value | tojson if value is mapping or value is not string else value }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

CHANNELS: dict[str, Any] = {
    "markers": {
        "open": "<|open|>",
        "close": "<|close|>",
        "separator": "<|sep|>",
        "end_of_message": "<|done|>",
    },
    "efforts": ["low", "high", "max"],
    "default_effort": "max",
    "instructions": {
        "tools": {"type": "tool-list", "text": "Tools: {value}"},
        "effort": {"type": "effort", "text": "Think this much: {value}."},
        "tool_choice_required": {"type": "tool-choice", "text": "Call a tool."},
        "json_object": {"type": "form", "text": "Answer in JSON."},
        "json_schema": {"type": "form", "text": "Answer in JSON of this schema: {value}"},
    },
}


def write_json(path: Path, value: object) -> None:
    path.write_text(dumps(value), encoding="utf-8")


def train_pipeline(specials: Sequence[str] = HIDDEN, tags: Sequence[str] = TAGS) -> Pipeline:
    """A byte-level BPE of 400 tokens and special tokens, all in one `tokenizers` pipeline."""
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(CORPUS * 4, trainer)
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in specials])
    pipeline.add_tokens([AddedToken(text, normalized=False) for text in tags])
    return pipeline


def byte_level_checkpoint(
    folder: Path, *, template: str = TEMPLATE, settings: Mapping[str, Any] | None = None
) -> Pipeline:
    """Writes a checkpoint with `tokenizer.json` and a template.

    Returns:
      the pipeline as `tokenizers` runs it, to compare with.
    """
    pipeline = train_pipeline()
    pipeline.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", **(settings or {})})
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return pipeline


def small_ranks() -> dict[bytes, int]:
    """All bytes, and some longer strings that end inside characters too."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    longer = ["th", "the", "in", "the ", "\n\n", "  ", "mess", "message", "res", "call", "argument"]
    pieces = [text.encode() for text in longer]
    pieces += ["早".encode()[:2], "早上".encode()[:4], "🙂".encode()[:3], "ü".encode() + b"\xc3"]
    for piece in pieces:
        ranks[piece] = len(ranks)
    return ranks


def ranked_checkpoint(folder: Path, *, settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Writes a checkpoint with `tiktoken.model` and a channel format.

    Returns:
      the special tokens.
    """
    ranks = small_ranks()
    lines = [f"{b64encode(raw).decode()} {rank}" for raw, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    specials = {text: len(ranks) + 2 + place for place, text in enumerate(MARKERS)}
    declared = {str(token): {"content": text, "special": True} for text, token in specials.items()}
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": declared,
            "eos_token": {"content": "<|done|>"},
            "pat_str": PATTERN,
            **(settings or {}),
        },
    )
    write_json(folder / "text_format.json", {"special_slots": 8, "channels": CHANNELS})
    return specials
