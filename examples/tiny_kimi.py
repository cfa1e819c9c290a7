"""The small model of the Kimi K3 architecture: dimensions, text, and weights at first."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.tiny_text import PATTERN
from examples.tiny_text import VOCAB
from examples.tiny_text import Markup
from examples.tiny_text import sample_texts
from examples.tiny_text import train_merges
from examples.tiny_text import write_json
from mkc.ir.mxfp4 import GROUP
from mkc.runtime.text.byte_level import byte_of_character

CONTEXT = 1024
SPECIAL_SLOTS = 16  # ids behind the ranks
DECAY_BOUND = -5.0
OPEN, CLOSE, SEPARATOR, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
PADDING = "[PAD]"
SPECIAL = ("[BOS]", "[EOS]", OPEN, CLOSE, SEPARATOR, END, PADDING)
NAMES = ("message", "role", "user", "assistant", "system", "think", "response")
NAME_SAMPLES = 2000  # so that each is one token
MARKUP = Markup(
    end=END,
    padding=PADDING,
    opening=(OPEN, "message", " role", '="', "assistant", '"', SEPARATOR),
    prompted=((OPEN, "think", SEPARATOR), (OPEN, "response", SEPARATOR)),
    between="",
)
# Without tools and JSON: a model of this size learns the others in an hour on one core.
WEIGHTS = {
    "addition": 4.0,
    "subtraction": 3.0,
    "sort_numbers": 2.0,
    "sort_words": 1.0,
    "count_items": 1.0,
    "count_letters": 1.5,
    "weekday": 1.0,
    "small_talk": 0.4,
}
LAYERS = 4
FULL_LAYERS = [4]  # counted from 1
TEXT_CONFIG: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 128,
    "intermediate_size": 512,
    "kv_lora_rank": 64,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS,
        "gate_lower_bound": DECAY_BOUND,
        "head_dim": 64,
        "kda_layers": [one for one in range(1, LAYERS + 1) if one not in FULL_LAYERS],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": CONTEXT,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 2,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "routed_expert_hidden_size": 64,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "v_head_dim": 64,
    "vocab_size": VOCAB,
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": False,
                    "group_size": GROUP,
                    "num_bits": 4,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": False,
}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model without encoded weights."""
    return {key: one for key, one in config.items() if key != "quantization_config"}


def write_text_files(folder: Path, seed: int) -> None:
    """Trains the vocabulary; writes it and the format. The same seed gives the same files."""
    ranks = VOCAB - SPECIAL_SLOTS
    merged = train_merges(texts(Random(seed)), ranks).get_vocab()
    byte_of = byte_of_character()
    raw = {rank: bytes(byte_of[one] for one in text) for text, rank in merged.items()}
    assert sorted(raw) == list(range(ranks)), "ranks without a token"
    lines = [f"{b64encode(raw[rank]).decode()} {rank}" for rank in sorted(raw)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    added = {
        str(ranks + place): {"content": text, "special": True} for place, text in enumerate(SPECIAL)
    }
    settings = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": CONTEXT,
        "pad_token": PADDING,
        "tokenizer_class": "TikTokenTokenizer",
    }
    write_json(folder / "tokenizer_config.json", settings)
    markers = {"open": OPEN, "close": CLOSE, "separator": SEPARATOR, "end_of_message": END}
    text_format = {
        "pattern": PATTERN,
        "special_slots": SPECIAL_SLOTS,
        "channels": {"markers": markers},
    }
    write_json(folder / "text_format.json", text_format)


def texts(rng: Random) -> Iterator[str]:
    """What the merges are learned from: conversations, and names of the format."""
    yield from sample_texts(rng)
    for name in NAMES:
        yield from repeat(name, NAME_SAMPLES)
        yield from repeat(f' {name}="', NAME_SAMPLES)


def initial_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of a checkpoint of the `kimi_k3` architecture."""
    if name.endswith("norm.weight"):
        value = np.ones(shape)
    elif name.endswith(("res_proj.weight", "A_log", "e_score_correction_bias")):
        value = np.zeros(shape)  # stored vectors count alike, as do experts; the rate is 1
    elif name.endswith("dt_bias"):
        decay = np.exp(rng.uniform(np.log(0.001), np.log(0.2), shape)) / -DECAY_BOUND
        value = np.log(decay / (1 - decay))  # a sigmoid of it gives the decay
    elif name.endswith(("o_proj.weight", ".down_proj.weight", "expert_up_proj.weight")):
        value = rng.standard_normal(shape) * 0.2 / shape[-1] ** 0.5
    elif name.endswith("conv1d.weight"):
        value = rng.uniform(-0.5, 0.5, shape)
    elif "embed" in name:
        value = rng.standard_normal(shape) * 0.2
    elif name.endswith(("f_b_proj.weight", "lm_head.weight")):
        value = rng.standard_normal(shape) * 0.3 / shape[-1] ** 0.5
    else:
        value = rng.standard_normal(shape) / shape[-1] ** 0.5
    return value.astype(np.float32)
