"""DFlash2: drafts a block of tokens at once from what layers of the target show.

Keys and values of verified positions come from the target alone, never from the drafter's layers,
so they are computed once and kept in the drafter's own caches. A block is the newest token and
masks; it is bidirectional, and short convolutions with kernels of its own for every row mix
neighbouring rows. A selector then walks over the block: each row's best candidates, scored with
the token chosen before. Embedding and LM head are those of the target.

Everything is rounded to bf16 as in the published implementation, but selector scores stay in f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mkc
from models import config_keys as keys

TAP = "output"  # layer L of the target is seen behind it
SLIDING = "sliding_attention"
FULL = "full_attention"
SELECTOR = "candidate_selector."  # before the names of its tensors
SIDES = 2  # convolutions before and after a part of a layer
SUPPORTED = (  # feature, key, the only value, which is also the default
    ("biases in attention", "attention_bias", False),
    ("another MLP activation", "hidden_act", "silu"),
    ("weights of another dtype", "dtype", "bfloat16"),
    ("quantised weights", "quantization_config", None),
)
UNSUPPORTED_DRAFT_KEYS = ("output_multiplier", "logit_softcap", "embedding_scale")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Dimensions of one checkpoint, from its config.json.

    Attributes:
      windows: of each layer's attention, None where it sees everything.
      causal: for each layer, whether a row of the block sees only those before it.
      block: rows: the newest token and the drafts.
      mask: token id that stands for a token to be drafted.
      conv_taps, conv_group: rows that a convolution sees, and channels that share a kernel.
      rank, candidates: of the selector.
      target_layers: layers of the target that are looked at.
    """

    hidden: int
    mlp: int
    vocab: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    block: int
    mask: int
    conv_taps: int
    conv_group: int
    rank: int
    candidates: int
    target_layers: tuple[int, ...]
    max_positions: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """From the contents of a Hugging Face config.json.

        Raises:
          mkc.ConfigError: a key is missing or wrong, or asks for what this drafter cannot do.
        """
        draft = keys.section(config, "dflash_config")
        rope = keys.section(config, "rope_parameters")
        keys.refuse_unsupported(_rules(config, draft, rope))
        kinds = _layer_types(config)
        loaded = cls(
            hidden=keys.size(config, "hidden_size"),
            mlp=keys.size(config, "intermediate_size"),
            vocab=keys.size(config, "vocab_size"),
            eps=keys.positive(config, "rms_norm_eps"),
            heads=keys.size(config, "num_attention_heads"),
            kv_heads=keys.size(config, "num_key_value_heads"),
            head_dim=keys.size(config, "head_dim"),
            theta=keys.positive(rope, "rope_theta"),
            windows=tuple(
                keys.size(config, "sliding_window") if kind == SLIDING else None for kind in kinds
            ),
            causal=tuple(_causal(config, kind) for kind in kinds),
            block=keys.size(draft, "block_size", least=2),
            mask=keys.size(draft, "mask_token_id", least=0),
            conv_taps=keys.size(draft, "conv_kernel_size"),
            conv_group=keys.size(draft, "conv_group_size"),
            rank=keys.size(draft, "selector_rank"),
            candidates=keys.size(draft, "selector_top_k"),
            target_layers=_target_layers(config, draft),
            max_positions=keys.size(config, "max_position_embeddings"),
        )
        keys.check_multiple(
            "num_attention_heads", loaded.heads, "num_key_value_heads", loaded.kv_heads
        )
        if loaded.mask >= loaded.vocab:
            expected = f"a token id below vocab_size, which is {loaded.vocab}"
            raise mkc.ConfigValueError(key="mask_token_id", got=loaded.mask, expected=expected)
        keys.check_multiple("hidden_size", loaded.hidden, "conv_group_size", loaded.conv_group)
        return loaded


def form(config: Config) -> mkc.DraftForm:
    """What the drafter needs of a target."""
    return mkc.DraftForm(
        tap=TAP,
        layers=config.target_layers,
        rows=config.block,
        candidates=config.candidates,
        hidden=config.hidden,
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
    scores, projected = block(config, tokens, step)
    return select(config, scores, projected, tokens, step)


def block(config: Config, tokens: mkc.Tensor, step: mkc.DraftStep) -> tuple[mkc.Tensor, mkc.Tensor]:
    """Logits of every row [rows, vocab], and what the selector sees of it [rows, rank]."""
    seen = context(config, step.remembered)
    seen_table = rotary_table(config, step.remembered.positions)
    table = rotary_table(config, step.positions)
    h = mkc.embed(tokens, step.table)
    for layer in mkc.layers(len(config.windows), prefix="layers.{index}."):
        x = norm(config, h, layer.param("input_layernorm.weight", [config.hidden]))
        before, after = convolutions(config, x, layer, "attention_conv", step)
        k, v = keys_values(config, seen, layer, seen_table)
        remembered = (k, v, step.remembered.positions)
        h = h + after(attention(config, before(x), layer, step, table, remembered))
        x = norm(config, h, layer.param("post_attention_layernorm.weight", [config.hidden]))
        before, after = convolutions(config, x, layer, "mlp_conv", step)
        h = h + after(mlp(config, before(x), layer))
    h = norm(config, h, mkc.param("norm.weight", [config.hidden]))
    name = SELECTOR + "hidden_projection.weight"
    projection = mkc.param(name, [config.rank, config.hidden])
    return mkc.linear(h, step.head), mkc.linear(h, projection)


def context(config: Config, step: mkc.ContextStep) -> mkc.Tensor:
    """What the drafter sees of verified rows: [rows, hidden]."""
    width = len(config.target_layers) * config.hidden
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
    """Grouped-query attention of the block to the verified positions and to itself."""
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
        causal=config.causal[layer.index],
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


def convolutions(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str, step: mkc.DraftStep
) -> tuple[Convolution, Convolution]:
    """Those before and after a part of a layer; the kernels of both come from its input x."""
    groups = config.hidden // config.conv_group
    numbers = mkc.axis(SIDES * config.conv_taps * groups, "kernels")
    kernels = project(config, x, layer, f"{name}.kernel_projection.weight", numbers)
    base = layer.param(f"{name}.base_kernel", [SIDES, config.conv_taps, config.hidden])
    before, after = (
        Convolution(
            kernels=kernels,
            base=base,
            side=side,
            group=config.conv_group,
            rows=step.rows_per_sequence,
        )
        for side in range(SIDES)
    )
    return before, after


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution along the block, ready to be applied."""

    kernels: mkc.Tensor
    base: mkc.Tensor
    side: int
    group: int
    rows: int

    def __call__(self, x: mkc.Tensor) -> mkc.Tensor:
        return mkc.dynamic_conv(
            x, self.kernels, self.base, side=self.side, group=self.group, rows=self.rows
        )


def select(
    config: Config,
    scores: mkc.Tensor,
    projected: mkc.Tensor,
    tokens: mkc.Tensor,
    step: mkc.DraftStep,
) -> mkc.Drafts:
    """The walk over the best candidates of each row; row 0, the anchor's, is not used."""
    books = [config.vocab, config.rank]
    values, ids = mkc.top_k(scores, config.candidates)
    return mkc.selector_walk(
        step,
        values,
        ids,
        projected,
        tokens=tokens,
        predecessor=mkc.param(SELECTOR + "predecessor_codebook", books),
        successor=mkc.param(SELECTOR + "successor_codebook", books),
    )


def project(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str, out: mkc.Axis
) -> mkc.Tensor:
    """A projection of the residual width."""
    return mkc.linear(x, layer.param(name, [out, config.hidden]))


def _rules(
    config: Mapping[str, Any], draft: Mapping[str, Any], rope: Mapping[str, Any]
) -> Iterator[keys.Rule]:
    """What a config may ask for and this drafter cannot do."""
    for feature, key, usual in SUPPORTED:
        yield feature, key, config.get(key, usual), (usual,)
    yield "scaled rotary", "rope_type", rope.get("rope_type", "default"), ("default",)
    for key in UNSUPPORTED_DRAFT_KEYS:
        yield f"'{key}'", key, draft.get(key), (None,)


def _causal(config: Mapping[str, Any], kind: str) -> bool:
    """As the published implementation reads it: without the key, sliding layers are causal."""
    value = config.get("is_causal", kind == SLIDING)
    if not isinstance(value, bool):
        raise mkc.ConfigValueError(key="is_causal", got=value, expected="true or false")
    return value


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    count = keys.size(config, "num_hidden_layers")
    expected = f"a list of {count} entries, each '{SLIDING}' or '{FULL}'"
    kinds = keys.need(config, "layer_types", expected)
    fits = isinstance(kinds, list | tuple) and len(kinds) == count
    if not fits or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise mkc.ConfigValueError(key="layer_types", got=kinds, expected=expected)
    return tuple(kinds)


def _target_layers(config: Mapping[str, Any], draft: Mapping[str, Any]) -> tuple[int, ...]:
    key = "target_layer_ids"
    count = keys.size(config, "num_target_layers")
    expected = f"a list of different layers of the target, from 0 to {count - 1}"
    layers = keys.need(draft, key, expected)
    fits = isinstance(layers, list | tuple) and bool(layers)
    if not fits or not all(type(one) is int and 0 <= one < count for one in layers):
        raise mkc.ConfigValueError(key=key, got=layers, expected=expected)
    if len(set(layers)) < len(layers):
        raise mkc.ConfigValueError(key=key, got=layers, expected=expected)
    return tuple(layers)


DRAFTER = mkc.Drafter(
    name="dflash2",
    load_config=Config.from_hf,
    form=form,
    remember=remember,
    propose=propose,
    default_config="configs/dflash2_qwen38_27b.json",
    small_config="configs/dflash2_qwen38_small.json",
)
