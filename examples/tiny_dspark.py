"""The DSpark drafter of the small Kimi model: dimensions, and what is wrong with its drafts."""

from __future__ import annotations

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
from examples.tiny_kimi import CONTEXT
from examples.tiny_kimi import SPECIAL
from examples.tiny_kimi import SPECIAL_SLOTS
from examples.tiny_kimi import TEXT_CONFIG
from examples.tiny_text import VOCAB
from models import dspark
from models import kimi_k3

MASK = VOCAB - SPECIAL_SLOTS + SPECIAL.index("[PAD]")
WINDOW = 128  # what the target was trained on
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [1, 2, 3],
    "block_size": BLOCK,
    "confidence_head_with_markov": True,
    "draft_vocab_size": VOCAB,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 64,
    "mask_token_id": MASK,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_model_type": "dspark",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": TEXT_CONFIG["hidden_size"],
        "intermediate_size": 384,
        "layer_types": ["sliding_attention"] * 2,
        "max_position_embeddings": CONTEXT,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": TEXT_CONFIG["rms_norm_eps"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": VOCAB,
    },
}
PREDECESSOR, SUCCESSOR = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
CONFIDENCE_SHARE = 0.2  # of the loss


def outputs(config: dspark.Config, step: mkc.DraftStep) -> Outputs:
    """Hidden states, logits without the Markov head, and drafts."""
    tokens = mkc.block_tokens(step, mask=config.mask)
    hidden, logits = dspark.block(config, tokens, step)
    drafts, _ = dspark.walk(config, tokens, hidden, logits, step)
    return {"hidden": hidden, "logits": logits, "drafts": drafts}


def errors(weights: Arrays, found: dict[str, Array], batch: dict[str, Array]) -> Array:
    """Cross entropy of the drafts and of the confidence that they are right, in nats.

    The Markov head is shown the right token before each. Row k is for the token behind its own.
    """
    hidden, logits = found["hidden"][:, :, :-1], found["logits"][:, :, :-1]
    wanted = batch["wanted"]
    before = weights[PREDECESSOR][before_each(batch)]
    scores = logits + before @ weights[SUCCESSOR].T
    both = jax.lax.stop_gradient(jnp.concatenate([hidden, before], axis=-1))
    judged = both @ weights[CONFIDENCE][0] + weights[CONFIDENCE_BIAS]
    right = jnp.argmax(scores, axis=-1) == wanted
    doubt = jnp.where(right, jax.nn.softplus(-judged), jax.nn.softplus(judged))
    return cross_entropy(scores, wanted) + CONFIDENCE_SHARE * doubt


def initial_draft_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of the drafter's checkpoint; heads change nothing at first."""
    if name.endswith("norm.weight"):
        value = np.ones(shape)
    elif name in (SUCCESSOR, CONFIDENCE, CONFIDENCE_BIAS):
        value = np.zeros(shape)
    elif name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
        value = rng.standard_normal(shape) * 0.3 / shape[-1] ** 0.5
    elif name in ("embed_tokens.weight", PREDECESSOR):
        value = rng.standard_normal(shape) * 0.3
    else:
        value = rng.standard_normal(shape) / shape[-1] ** 0.5
    return value.astype(np.float32)


DSPARK = DraftKind(
    target=kimi_k3.MODEL,
    drafter=dspark.DRAFTER,
    config=DRAFT_CONFIG,
    embedding=kimi_k3.PREFIX + "model.embed_tokens.weight",
    outputs=outputs,
    errors=errors,
    initial_tensor=initial_draft_tensor,
)
