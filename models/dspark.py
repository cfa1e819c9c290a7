"""DSpark: drafts a block of tokens at once, then corrects each by the token before.

What enters some layers of the target is what the drafter sees of verified positions. Their keys and
values come from that alone, never from the drafter's layers, so they are computed once and kept in
the drafter's own caches. A block is the newest token and masks, and causal. Row k of it stands for
the token behind its own position, the newest token's row included. A Markov head adds what follows
from the token before, so the choice goes from left to right; a confidence head says how sure each
choice is. Embedding and LM head are the drafter's own.

Drafts are the best tokens, also where the target samples. Everything is rounded to bf16 as in the
published implementation; scores of attention and confidences are f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mkc
from models import config_keys as keys

TAP = "input"  # layer L of the target is seen in front of it
SLIDING = "sliding_attention"
FULL = "full_attention"
USUAL_DRAFTS = 7  # with the newest token eight rows, as published deployments have them
# Keys that no published config has: drafts of a round, and the confidence below which no more are
# proposed. Neither changes what is emitted.
DRAFTS_KEY = "drafts"
CUT_KEY = "confidence_threshold"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Dimensions of one checkpoint, from its config.json.

    Attributes:
      target_hidden: width of what the target shows.
      windows: of each layer's attention, None where it sees everything.
      drafts: of a round; the block has as many rows that count.
      cut: confidence below which a draft and those behind it are not proposed, None for never.
      mask: token id that stands for a token to be drafted.
      rank: of the Markov head.
      target_layers: layers of the target that are looked at.
    """

    hidden: int
    target_hidden: int
    mlp: int
    vocab: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    windows: tuple[int | None, ...]
    drafts: int
    cut: float | None
    mask: int
    rank: int
    target_layers: tuple[int, ...]
    max_positions: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """From the contents of a Hugging Face config.json.

        Raises:
          mkc.ConfigError: a key is missing or wrong, or asks for what this drafter cannot do.
        """
        trunk = keys.section(config, "transformer_layer_config")
        rope = keys.section(trunk, "rope_parameters")
        keys.refuse_unsupported(_rules(config, trunk, rope))
        hidden = keys.size(trunk, "hidden_size")
        narrow = config.get("target_hidden_size") is None
        loaded = cls(
            hidden=hidden,
            target_hidden=hidden if narrow else keys.size(config, "target_hidden_size"),
            mlp=keys.size(trunk, "intermediate_size"),
            vocab=keys.size(trunk, "vocab_size"),
            eps=keys.positive(trunk, "rms_norm_eps"),
            heads=keys.size(trunk, "num_attention_heads"),
            kv_heads=keys.size(trunk, "num_key_value_heads"),
            head_dim=keys.size(trunk, "head_dim"),
            theta=keys.positive(rope, "rope_theta"),
            windows=_windows(trunk),
            drafts=_drafts(config),
            cut=_cut(config),
            mask=keys.size(config, "mask_token_id", least=0),
            rank=keys.size(config, "markov_rank"),
            target_layers=keys.numbers(
                config, "aux_hidden_state_layer_ids", least=0, most=keys.LARGEST_SIZE
            ),
            max_positions=keys.size(trunk, "max_position_embeddings"),
        )
        keys.check_multiple(
            "num_attention_heads", loaded.heads, "num_key_value_heads", loaded.kv_heads
        )
        if not loaded.target_layers:
            expected = "at least one layer of the target"
            raise mkc.ConfigValueError(
                key="aux_hidden_state_layer_ids", got=loaded.target_layers, expected=expected
            )
        if loaded.mask >= loaded.vocab:
            expected = f"a token id below vocab_size, which is {loaded.vocab}"
            raise mkc.ConfigValueError(key="mask_token_id", got=loaded.mask, expected=expected)
        return loaded


def form(config: Config) -> mkc.DraftForm:
    """What the drafter needs of a target."""
    return mkc.DraftForm(
        tap=TAP,
        layers=config.target_layers,
        rows=1 + config.drafts,
        candidates=0,
        hidden=config.target_hidden,
        vocab=config.vocab,
        max_positions=config.max_positions,
    )


def remember(config: Config, step: mkc.ContextStep) -> None:
    """Keys and values of verified rows enter the caches."""
    seen = context(config, step)
    table = rotary_table(config, step.positions)
    for layer in mkc.layers(len(config.windows), prefix="layers.{index}."):
        k, v = keys_values(config, seen, layer, table)
        mkc.append_cache(k, v, positions=step.positions, cache=cache(config, layer))


def propose(config: Config, step: mkc.DraftStep) -> mkc.Drafts:
    """Fills one block per sequence."""
    tokens = mkc.block_tokens(step, mask=config.mask)
    hidden, scores = block(config, tokens, step)
    chosen, confidence = walk(config, tokens, hidden, scores, step)
    if config.cut is None:
        return mkc.Drafts(tokens=chosen)
    positions = mkc.cut_drafts(step, confidence, threshold=config.cut)
    return mkc.Drafts(tokens=chosen, positions=positions)


def walk(
    config: Config, tokens: mkc.Tensor, hidden: mkc.Tensor, scores: mkc.Tensor, step: mkc.DraftStep
) -> tuple[mkc.Tensor, mkc.Tensor]:
    """Drafts, chosen from left to right, and how sure each is: [rows]."""
    books = [config.vocab, config.rank]
    return mkc.markov_walk(
        step,
        scores,
        tokens=tokens,
        predecessor=mkc.param("markov_head.markov_w1.weight", books),
        successor=mkc.param("markov_head.markov_w2.weight", books),
        hidden=hidden,
        head=mkc.param("confidence_head.proj.weight", [1, config.hidden + config.rank]),
        bias=mkc.param("confidence_head.proj.bias", [1]),
    )


def block(config: Config, tokens: mkc.Tensor, step: mkc.DraftStep) -> tuple[mkc.Tensor, mkc.Tensor]:
    """Hidden states [rows, hidden] and logits [rows, vocab] of every row.

    The last row of a block is there because the target has so many rows; nothing reads it.
    """
    vocab = mkc.axis(config.vocab, "vocabulary")
    seen = context(config, step.remembered)
    seen_table = rotary_table(config, step.remembered.positions)
    table = rotary_table(config, step.positions)
    h = mkc.embed(tokens, mkc.param("embed_tokens.weight", [vocab, config.hidden]))
    for layer in mkc.layers(len(config.windows), prefix="layers.{index}."):
        x = norm(config, h, layer.param("input_layernorm.weight", [config.hidden]))
        k, v = keys_values(config, seen, layer, seen_table)
        h = h + attention(config, x, layer, step, table, (k, v, step.remembered.positions))
        x = norm(config, h, layer.param("post_attention_layernorm.weight", [config.hidden]))
        h = h + mlp(config, x, layer)
    h = norm(config, h, mkc.param("norm.weight", [config.hidden]))
    return h, mkc.linear(h, mkc.param("lm_head.weight", [vocab, config.hidden]))


def context(config: Config, step: mkc.ContextStep) -> mkc.Tensor:
    """What the drafter sees of verified rows: [rows, hidden]."""
    width = len(config.target_layers) * config.target_hidden
    mixed = mkc.linear(step.features, mkc.param("fc.weight", [config.hidden, width]))
    return norm(config, mixed, mkc.param("hidden_norm.weight", [config.hidden]))


def norm(config: Config, x: mkc.Tensor, weight: mkc.Tensor) -> mkc.Tensor:
    """Plain weight; rounded before it too."""
    return mkc.rms_norm(x, weight, eps=config.eps, rounding="twice")


type Table = tuple[mkc.Tensor, mkc.Tensor]  # cos and sin


def rotary_table(config: Config, positions: mkc.Tensor) -> Table:
    """For all channels of a head."""
    return mkc.rotary_table(positions, theta=config.theta, dim=config.head_dim)


def cache(config: Config, layer: mkc.Layer) -> mkc.KvCache:
    """Of verified positions."""
    return layer.kv_cache("self_attn.kv", config.kv_heads, config.head_dim)


def keys_values(config: Config, x: mkc.Tensor, layer: mkc.Layer, table: Table) -> Table:
    """Keys, normalised and rotated, and values of rows; each [rows, kv heads, head dim]."""
    kv = mkc.heads(config.kv_heads, config.head_dim, "kv_heads")
    k = mkc.split_heads(project(config, x, layer, "self_attn.k_proj.weight", kv))
    v = mkc.split_heads(project(config, x, layer, "self_attn.v_proj.weight", kv))
    k = norm(config, k, layer.param("self_attn.k_norm.weight", [config.head_dim]))
    return mkc.rotary(k, *table), v


def attention(
    config: Config,
    x: mkc.Tensor,
    layer: mkc.Layer,
    step: mkc.DraftStep,
    table: Table,
    remembered: tuple[mkc.Tensor, mkc.Tensor, mkc.Tensor],
) -> mkc.Tensor:
    """Grouped-query attention of the block to verified positions and to its own earlier rows.

    As in training, the window is that of the block: all rows see the same verified positions.
    """
    heads = mkc.heads(config.heads, config.head_dim, "heads")
    q = mkc.split_heads(project(config, x, layer, "self_attn.q_proj.weight", heads))
    q = norm(config, q, layer.param("self_attn.q_norm.weight", [config.head_dim]))
    k, v = keys_values(config, x, layer, table)
    o = mkc.block_attention(
        mkc.rotary(q, *table),
        k,
        v,
        positions=step.positions,
        context=remembered,
        cache=cache(config, layer),
        scale=config.head_dim**-0.5,
        window=config.windows[layer.index],
        causal=True,
        anchored=True,
    )
    return mkc.linear(
        mkc.merge_heads(o), layer.param("self_attn.o_proj.weight", [config.hidden, heads])
    )


def mlp(config: Config, x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """SwiGLU."""
    width = mkc.axis(config.mlp, "intermediate")
    gate = project(config, x, layer, "mlp.gate_proj.weight", width)
    up = project(config, x, layer, "mlp.up_proj.weight", width)
    down = layer.param("mlp.down_proj.weight", [config.hidden, width])
    return mkc.linear(mkc.silu(gate) * up, down)


def project(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str, out: mkc.Axis
) -> mkc.Tensor:
    """A projection of the residual width."""
    return mkc.linear(x, layer.param(name, [out, config.hidden]))


def _rules(
    config: Mapping[str, Any], trunk: Mapping[str, Any], rope: Mapping[str, Any]
) -> list[keys.Rule]:
    """What a config may ask for and this drafter cannot do."""
    vocab = trunk.get("vocab_size")
    usual: list[tuple[Mapping[str, Any], str, str, object]] = [
        (config, "another drafter", "speculators_model_type", "dspark"),
        (config, "blocks without a draft of the newest token's row", "sample_from_anchor", True),
        (config, "blocks that are not causal", "sliding_window_non_causal", False),
        (config, "another Markov head", "markov_head_type", "vanilla"),
        (config, "drafters without a confidence head", "enable_confidence_head", True),
        (config, "another confidence head", "confidence_head_with_markov", True),
        (config, "a vocabulary smaller than the target's", "draft_vocab_size", vocab),
        (config, "weights of another dtype", "dtype", "bfloat16"),
        (config, "quantised weights", "quantization_config", None),
        (trunk, "biases in attention", "attention_bias", False),
        (trunk, "another MLP activation", "hidden_act", "silu"),
        (trunk, "another trunk", "model_type", "qwen3"),
        (rope, "scaled rotary embeddings", "rope_type", "default"),
    ]
    return [(feature, key, part.get(key, fit), (fit,)) for part, feature, key, fit in usual]


def _windows(trunk: Mapping[str, Any]) -> tuple[int | None, ...]:
    count = keys.size(trunk, "num_hidden_layers")
    expected = f"a list of {count} entries, each '{SLIDING}' or '{FULL}'"
    kinds = keys.need(trunk, "layer_types", expected)
    fits = isinstance(kinds, list | tuple) and len(kinds) == count
    if not fits or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise mkc.ConfigValueError(key="layer_types", got=kinds, expected=expected)
    return tuple(keys.size(trunk, "sliding_window") if kind == SLIDING else None for kind in kinds)


def _drafts(config: Mapping[str, Any]) -> int:
    """Drafts of a round, at most the block's rows."""
    rows = keys.size(config, "block_size")
    if DRAFTS_KEY not in config:
        return min(rows, USUAL_DRAFTS)
    drafts = keys.size(config, DRAFTS_KEY)
    if drafts > rows:
        expected = f"at most block_size, which is {rows}"
        raise mkc.ConfigValueError(key=DRAFTS_KEY, got=drafts, expected=expected)
    return drafts


def _cut(config: Mapping[str, Any]) -> float | None:
    if config.get(CUT_KEY) is None:
        return None
    threshold = keys.positive(config, CUT_KEY)
    if threshold > 1:
        raise mkc.ConfigValueError(key=CUT_KEY, got=threshold, expected="a confidence from 0 to 1")
    return threshold


DRAFTER = mkc.Drafter(
    name="dspark",
    load_config=Config.from_hf,
    form=form,
    remember=remember,
    propose=propose,
    default_config="configs/dspark_kimi_k3.json",
    small_config="configs/dspark_kimi_k3_small.json",
)
