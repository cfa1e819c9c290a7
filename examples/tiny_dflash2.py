"""The DFlash2 drafter of the small model: dimensions, and what is wrong with its drafts."""

from __future__ import annotations

from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import mkc
from examples.muon import Arrays
from examples.tiny_drafter import BLOCK
from examples.tiny_drafter import DraftKind
from examples.tiny_drafter import Outputs
from examples.tiny_drafter import before_each
from examples.tiny_drafter import cross_entropy
from examples.tiny_family import initial_tensor
from examples.tiny_folder import CONTEXT
from examples.tiny_folder import TEXT_CONFIG
from models import dflash2
from models import qwen38

MASK = 759  # <|endoftext|>, which no conversation has
WINDOW = 128  # what the target was trained on
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": BLOCK,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": 32,
        "selector_top_k": 16,
        "target_layer_ids": [0, 1, 2, 3],
    },
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": TEXT_CONFIG["hidden_size"],
    "intermediate_size": 512,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "max_position_embeddings": CONTEXT,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
    "rms_norm_eps": TEXT_CONFIG["rms_norm_eps"],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": TEXT_CONFIG["vocab_size"],
}
EMBEDDING = "model.language_model.embed_tokens.weight"
PREDECESSOR = dflash2.SELECTOR + "predecessor_codebook"
SUCCESSOR = dflash2.SELECTOR + "successor_codebook"
PLAIN_SHARE = 0.5  # of the loss without the selector, which decides what are candidates


def outputs(config: dflash2.Config, step: mkc.DraftStep) -> Outputs:
    """Logits, what the selector sees of them, and drafts."""
    tokens = mkc.block_tokens(step, mask=config.mask)
    logits, projected = dflash2.block(config, tokens, step)
    drafts = dflash2.select(config, logits, projected, tokens, step)
    return {"logits": logits, "projected": projected, "drafts": drafts.tokens}


def errors(weights: Arrays, found: dict[str, Array], batch: dict[str, Array]) -> Array:
    """Cross entropy of the drafts with and without the selector, in nats.

    The selector is shown the right token before each, and chooses among the candidates and the
    wanted token, should that be none of them.
    """
    logits, projected = found["logits"][:, :, 1:], found["projected"][:, :, 1:]
    wanted = batch["wanted"]
    known = weights[PREDECESSOR][before_each(batch)] * projected
    scores = logits + known @ weights[SUCCESSOR].T
    count = DRAFT_CONFIG["dflash_config"]["selector_top_k"]
    least = jax.lax.top_k(jax.lax.stop_gradient(logits), count)[0][..., -1:]
    is_wanted = jnp.arange(logits.shape[-1]) == wanted[..., None]
    scores = jnp.where((logits >= least) | is_wanted, scores, -jnp.inf)
    return cross_entropy(scores, wanted) + PLAIN_SHARE * cross_entropy(logits, wanted)


def initial_draft_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of the drafter's checkpoint; at first convolutions let everything through."""
    if name == "norm.weight":
        return np.full(shape, 0.1, np.float32)  # the target's LM head makes large logits of ones
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("base_kernel"):
        base = np.zeros(shape, np.float32)
        base[:, 0] = 1.0
        return base
    if name.endswith("kernel_projection.weight"):
        return (rng.standard_normal(shape) * 0.1 / sqrt(shape[-1])).astype(np.float32)
    if name.endswith("codebook"):
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)
    return initial_tensor(rng, name, shape)


DFLASH2 = DraftKind(
    target=qwen38.MODEL,
    drafter=dflash2.DRAFTER,
    config=DRAFT_CONFIG,
    embedding=EMBEDDING,
    outputs=outputs,
    errors=errors,
    initial_tensor=initial_draft_tensor,
)
