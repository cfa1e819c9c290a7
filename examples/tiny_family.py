"""What the two small models differ in; everything else about their training is the same."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mkc
from examples import tiny_kimi
from examples.tiny_folder import CONFIG
from examples.tiny_text import CHATML
from examples.tiny_text import Markup
from examples.tiny_text import write_text_files
from models import kimi_k3
from models import qwen38

type InitialTensor = Callable[[np.random.Generator, str, tuple[int, ...]], NDArray[np.float32]]

# How often each task comes, in proportion: more for what takes longer to learn.
WEIGHTS = {
    "addition": 4.0,
    "subtraction": 4.0,
    "sort_numbers": 2.5,
    "sort_words": 1.5,
    "count_items": 1.0,
    "count_letters": 1.5,
    "next_date": 1.5,
    "weekday": 1.0,
    "json": 2.0,
    "tool_call": 2.0,
    "tool_answer": 1.0,
    "no_tool": 0.4,
    "small_talk": 0.4,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture with its text, as far as training has to know.

    Attributes:
      config: of the model that is trained; no weight is encoded in it.
      stored_config: contents of the written config.json.
      markup: of its conversations.
      write_text: writes the files of the text to a folder, from a seed.
      weights: how often each task comes, in proportion.
      initial_tensor: one tensor of a checkpoint at first.
      encoded: part of the names of matrices that are stored in MXFP4; empty for none.
    """

    model: mkc.Model
    config: Mapping[str, Any]
    stored_config: Mapping[str, Any]
    markup: Markup
    write_text: Callable[[Path, int], None]
    weights: Mapping[str, float]
    initial_tensor: InitialTensor
    encoded: str = ""


def initial_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of a checkpoint of the `qwen3_5` architecture."""
    if name.endswith("linear_attn.norm.weight"):
        value = np.ones(shape)
    elif name.endswith("norm.weight"):
        value = np.zeros(shape)  # the weight is 1 + w
    elif name.endswith("A_log"):
        value = np.log(rng.uniform(1.0, 8.0, shape))
    elif name.endswith("dt_bias"):
        rate = np.exp(rng.uniform(np.log(0.001), np.log(0.1), shape))
        value = rate + np.log(-np.expm1(-rate))  # softplus of it is the rate
    elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
        value = rng.standard_normal(shape) * 0.2 / shape[-1] ** 0.5
    elif name.endswith("conv1d.weight"):
        value = rng.uniform(-0.5, 0.5, shape)
    elif "embed" in name:
        value = rng.standard_normal(shape) * 0.05
    else:
        value = rng.standard_normal(shape) / shape[-1] ** 0.5
    return value.astype(np.float32)


TINY = Family(
    model=qwen38.MODEL,
    config=CONFIG,
    stored_config=CONFIG,
    markup=CHATML,
    write_text=write_text_files,
    weights=WEIGHTS,
    initial_tensor=initial_tensor,
)
KIMI_TINY = Family(
    model=kimi_k3.MODEL,
    config=tiny_kimi.plain(tiny_kimi.CONFIG),
    stored_config=tiny_kimi.CONFIG,
    markup=tiny_kimi.MARKUP,
    write_text=tiny_kimi.write_text_files,
    weights=tiny_kimi.WEIGHTS,
    initial_tensor=tiny_kimi.initial_tensor,
    encoded=".experts.",
)
FAMILIES = {"tiny": TINY, "kimi_tiny": KIMI_TINY}
