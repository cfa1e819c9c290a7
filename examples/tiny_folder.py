"""The small model as a Hugging Face folder: dimensions, weights, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from examples.tiny_text import END_OF_TURN
from examples.tiny_text import VOCAB
from examples.tiny_text import write_json
from mkc.runtime.safetensors_file import header_bytes
from mkc.runtime.text import load_tokenizer

CONTEXT = 1024
TRAINING_FILE = "training.json"
DRAFTER_FOLDER = "drafter"  # in the folder of the model
TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 512,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": CONTEXT,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
}
DTYPE_NAMES = {
    np.dtype(bfloat16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint8): "U8",
}


def write_model(
    folder: Path,
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any] = CONFIG,
    *,
    end_of_turn: str = END_OF_TURN,
) -> None:
    """Writes weights and configs beside the files of the text, which are there already."""
    (end,) = load_tokenizer(folder, vocab=VOCAB).encode(end_of_turn, allow_special=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end})
    write_tensors(folder / "model.safetensors", tensors)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes a safetensors file; the same tensors give the same bytes."""
    names = sorted(tensors)
    described = {name: (DTYPE_NAMES[tensors[name].dtype], tensors[name].shape) for name in names}
    with path.open("wb") as file:
        file.write(header_bytes(described))
        for name in names:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())
