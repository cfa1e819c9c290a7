"""Kimi K3 text decoder (architecture `kimi_linear`).

Of the layers, most have Kimi delta attention: a delta rule whose decay is one number of each key
channel. The others have latent attention without rotary embeddings. Every 12 layers the residual
stream starts anew and its value is stored; what an attention or MLP reads is a mix of the stored
vectors and the stream. MLPs are mixtures of experts of a smaller, latent width.

Rounding is that of the module published with the checkpoint; scores of latent attention are f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mkc
from models import config_keys as keys

PREFIX = "language_model."
MODEL_TYPES = ("kimi_k3", "kimi_linear")
L2_EPS = 1e-6  # of the q and k normalisation; a constant of the architecture, not in its config
# Of the two norms of latent attention. The published module builds them without the config's eps;
# some servers pass that one. LOW_RANK_EPS_KEY in a config changes it, for comparison with those.
LOW_RANK_EPS = 1e-6
LOW_RANK_EPS_KEY = "low_rank_norm_eps"
FEWEST_TAPS = 2  # the newest input alone would leave a convolution without a state
MXFP4 = "mxfp4-pack-quantized"
# Said of the weights of a quantised checkpoint; nothing else is read.
MXFP4_WEIGHTS = (
    ("num_bits", 4),
    ("group_size", 32),
    ("type", "float"),
    ("symmetric", True),
    ("dynamic", False),
    ("strategy", "group"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Dimensions of one checkpoint, from its config.json.

    Attributes:
      full: for each layer, whether it has latent attention instead of delta attention.
      low_rank_eps: of the two norms of latent attention.
      block: layers between two that store the residual stream.
      heads: of both kinds of attention.
      kda_dim: of a head's queries, keys and values in delta attention.
      taps: inputs that a short convolution sees.
      decay_bound: below which the logarithm of a decay does not come.
      q_rank, kv_rank: of the latent vectors.
      key_dim, shared_dim, value_dim: of a head's key, the key that all heads share, a head's value.
      dense_layers: the first ones, whose MLP is no mixture of experts.
      top: experts of a row.
      latent: width that routed experts see.
      gate_cap, up_cap: soft caps of the MLPs' activation.
      mxfp4: whether routed experts are stored in MXFP4.
    """

    hidden: int
    vocab: int
    max_positions: int
    full: tuple[bool, ...]
    eps: float
    low_rank_eps: float
    block: int
    heads: int
    kda_dim: int
    taps: int
    decay_bound: float
    q_rank: int
    kv_rank: int
    key_dim: int
    shared_dim: int
    value_dim: int
    dense_layers: int
    mlp: int
    experts: int
    top: int
    renormalise: bool
    routed_scale: float
    latent: int
    expert_mlp: int
    shared_mlp: int
    gate_cap: float
    up_cap: float
    mxfp4: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """From the contents of a Hugging Face config.json, `text_config` nested or flat.

        Raises:
          mkc.ConfigError: a key is missing or wrong, or asks for what this model cannot do.
        """
        text = keys.section(config, "text_config") if "text_config" in config else config
        linear = keys.section(text, "linear_attn_config")
        keys.refuse_unsupported(_rules(config, text, linear))
        experts = keys.size(text, "num_experts")
        width = keys.size(text, "moe_intermediate_size")
        loaded = cls(
            hidden=keys.size(text, "hidden_size"),
            vocab=keys.size(text, "vocab_size"),
            max_positions=keys.size(text, "max_position_embeddings"),
            full=_layer_kinds(text, linear),
            eps=keys.positive(text, "rms_norm_eps"),
            low_rank_eps=(
                keys.positive(text, LOW_RANK_EPS_KEY) if LOW_RANK_EPS_KEY in text else LOW_RANK_EPS
            ),
            block=keys.size(text, "attn_res_block_size"),
            heads=keys.size(text, "num_attention_heads"),
            kda_dim=keys.size(linear, "head_dim"),
            taps=keys.size(linear, "short_conv_kernel_size", least=FEWEST_TAPS),
            decay_bound=_decay_bound(linear),
            q_rank=keys.size(text, "q_lora_rank"),
            kv_rank=keys.size(text, "kv_lora_rank"),
            key_dim=keys.size(text, "qk_nope_head_dim"),
            shared_dim=keys.size(text, "qk_rope_head_dim"),
            value_dim=keys.size(text, "v_head_dim"),
            dense_layers=keys.size(text, "first_k_dense_replace", least=0),
            mlp=keys.size(text, "intermediate_size"),
            experts=experts,
            top=keys.size(text, "num_experts_per_token"),
            renormalise=keys.flag(text, "moe_renormalize"),
            routed_scale=keys.positive(text, "routed_scaling_factor"),
            latent=keys.size(text, "routed_expert_hidden_size"),
            expert_mlp=width,
            shared_mlp=width * keys.size(text, "num_shared_experts"),
            gate_cap=keys.positive(text, "activation_situ_beta"),
            up_cap=keys.positive(text, "activation_situ_linear_beta"),
            mxfp4=_is_mxfp4(text.get("quantization_config", config.get("quantization_config"))),
        )
        if loaded.top > experts:
            expected = f"at most num_experts, which is {experts}"
            raise mkc.ConfigValueError(
                key="num_experts_per_token", got=loaded.top, expected=expected
            )
        return loaded

    @property
    def decays(self) -> int:
        """Entries of the stored A_log, of which the first `heads` count: padded to a head's width
        in the released checkpoint."""
        return max(self.heads, self.kda_dim)


def decoder(config: Config, step: mkc.Step) -> mkc.Outputs:
    """One decode step for `step.rows` token rows."""
    step.limit_context(config.max_positions)
    vocab = mkc.axis(config.vocab, "vocabulary")
    table = mkc.param(PREFIX + "model.embed_tokens.weight", [vocab, config.hidden])
    h = mkc.embed(step.tokens, table)
    layers = len(config.full)
    blocks = mkc.residual_blocks(h, -(-layers // config.block), period=config.block)
    for layer in mkc.layers(layers, prefix=PREFIX + "model.layers.{index}."):
        mkc.tap(layer, "input", h)
        x = mix(config, blocks, h, layer, "self_attention_res")
        x = norm(config, x, layer.param("input_layernorm.weight", [config.hidden]))
        blocks, h = mkc.store_block(blocks, h)
        attention = latent_attention if config.full[layer.index] else delta_attention
        h = h + attention(config, x, layer, step)
        x = mix(config, blocks, h, layer, "mlp_res")
        x = norm(config, x, layer.param("post_attention_layernorm.weight", [config.hidden]))
        is_dense = layer.index < config.dense_layers
        h = h + (dense_mlp if is_dense else mixture_of_experts)(config, x, layer)
    h = mix(config, blocks, h, None, PREFIX + "model.output_attn_res")
    h = norm(config, h, mkc.param(PREFIX + "model.norm.weight", [config.hidden]))
    return mkc.next_token(h, mkc.param(PREFIX + "lm_head.weight", [vocab, config.hidden]))


def mix(
    config: Config, blocks: mkc.StoredBlocks, h: mkc.Tensor, layer: mkc.Layer | None, name: str
) -> mkc.Tensor:
    """What a part of a layer reads: the stored vectors and the residual stream, weighted."""
    param = mkc.param if layer is None else layer.param
    return mkc.mix_blocks(
        blocks,
        h,
        norm=param(f"{name}_norm.weight", [config.hidden]),
        projection=param(f"{name}_proj.weight", [1, config.hidden]),
        eps=config.eps,
    )


def norm(
    config: Config, x: mkc.Tensor, weight: mkc.Tensor, *, eps: float | None = None
) -> mkc.Tensor:
    """Plain weight; rounded before it too."""
    return mkc.rms_norm(x, weight, eps=eps or config.eps, rounding="twice")


def delta_attention(config: Config, x: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
    """Short convolutions, delta rule on a recurrent state, gated norm. Beside the projections all
    is f32; A_log, dt_bias, the taps and the norm are stored so.
    """
    dim = config.kda_dim
    heads = mkc.heads(config.heads, dim)
    q, k, v = (convolved(config, x, layer, name) for name in "qkv")
    q = mkc.scale(mkc.l2_norm(q, eps=L2_EPS), dim**-0.5)
    k = mkc.l2_norm(k, eps=L2_EPS)
    beta = project(config, x, layer, "self_attn.b_proj.weight", mkc.heads(config.heads, 1))
    o = mkc.delta_rule(
        q,
        k,
        v,
        beta=mkc.sigmoid(beta, dtype=mkc.F32),
        decay=decay(config, x, layer),
        state=layer.state(
            "self_attn.recurrent", "recurrent", [mkc.heads(config.heads, 1), dim, dim], mkc.F32
        ),
        dtype=mkc.F32,
    )
    o = mkc.rms_norm(o, layer.param("self_attn.o_norm.weight", [dim], mkc.F32), eps=config.eps)
    gate = mkc.split_heads(project(config, x, layer, "self_attn.g_proj.weight", heads))
    o = mkc.multiply(o, mkc.sigmoid(gate, dtype=mkc.F32), dtype=mkc.BF16)
    out = layer.param("self_attn.o_proj.weight", [config.hidden, heads])
    return mkc.linear(mkc.merge_heads(o), out)


def convolved(config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str) -> mkc.Tensor:
    """Queries, keys or values behind their short convolution: [rows, heads, dim]."""
    heads = mkc.heads(config.heads, config.kda_dim)
    taps = config.taps
    convolved = mkc.causal_conv(
        project(config, x, layer, f"self_attn.{name}_proj.weight", heads),
        layer.param(f"self_attn.{name}_conv1d.weight", [heads, 1, taps], mkc.F32),
        state=layer.state(f"self_attn.{name}_conv", "conv", [taps - 1, heads]),
        activation="silu",
    )
    return mkc.split_heads(convolved)


def decay(config: Config, x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """Logarithm of what stays of each key channel, between the bound and 0: f32 [rows, heads, dim].

    A bounded sigmoid: no clamp and no softplus.
    """
    heads = mkc.heads(config.heads, config.kda_dim)
    low = project(config, x, layer, "self_attn.f_a_proj.weight", mkc.axis(config.kda_dim))
    raw = mkc.linear(low, layer.param("self_attn.f_b_proj.weight", [heads, config.kda_dim]))
    raw = mkc.add(raw, layer.param("self_attn.dt_bias", [heads], mkc.F32), dtype=mkc.F32)
    stored = layer.param("self_attn.A_log", [config.decays], mkc.F32)
    rate = mkc.slice(mkc.exp(stored), 0, config.heads)
    speed = mkc.sigmoid(mkc.scale_heads(mkc.split_heads(raw), rate))
    return mkc.scale(speed, config.decay_bound)


def latent_attention(config: Config, x: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
    """Attention over latent vectors, not rotated, and a sigmoid gate on its output."""
    key, shared, value = config.key_dim, config.shared_dim, config.value_dim
    low = project(config, x, layer, "self_attn.q_a_proj.weight", mkc.axis(config.q_rank))
    low = low_rank_norm(config, low, layer, "q_a_layernorm", config.q_rank)
    queries = mkc.heads(config.heads, key + shared)
    q = mkc.split_heads(
        mkc.linear(low, layer.param("self_attn.q_b_proj.weight", [queries, config.q_rank]))
    )
    width = mkc.axis(config.kv_rank + shared)
    both = project(config, x, layer, "self_attn.kv_a_proj_with_mqa.weight", width)
    latent = mkc.slice(both, 0, config.kv_rank)
    keys_values = mkc.heads(config.heads, key + value)
    o = mkc.latent_attention(
        mkc.slice(q, 0, key),
        mkc.slice(q, key, shared),
        low_rank_norm(config, latent, layer, "kv_a_layernorm", config.kv_rank),
        mkc.slice(both, config.kv_rank, shared),
        layer.param("self_attn.kv_b_proj.weight", [keys_values, config.kv_rank]),
        positions=step.positions,
        cache=mkc.latent_cache(layer, "self_attn.kv", rank=config.kv_rank, shared=shared),
        scale=(key + shared) ** -0.5,
    )
    heads = mkc.heads(config.heads, value)
    gate = mkc.split_heads(project(config, x, layer, "self_attn.g_proj.weight", heads))
    o = mkc.merge_heads(o * mkc.sigmoid(gate))
    return mkc.linear(o, layer.param("self_attn.o_proj.weight", [config.hidden, heads]))


def low_rank_norm(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str, rank: int
) -> mkc.Tensor:
    """The norm of a latent vector."""
    weight = layer.param(f"self_attn.{name}.weight", [rank])
    return norm(config, x, weight, eps=config.low_rank_eps)


def dense_mlp(config: Config, x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """The MLP of the first layers."""
    return gated_mlp(config, x, layer, "mlp.", config.mlp)


def gated_mlp(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, prefix: str, size: int
) -> mkc.Tensor:
    """An MLP with the capped gate."""
    width = mkc.axis(size, "intermediate")
    gate = project(config, x, layer, prefix + "gate_proj.weight", width)
    up = project(config, x, layer, prefix + "up_proj.weight", width)
    value = mkc.situ(gate, up, gate_cap=config.gate_cap, up_cap=config.up_cap)
    return mkc.linear(value, layer.param(prefix + "down_proj.weight", [config.hidden, width]))


def mixture_of_experts(config: Config, x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """Routed experts on a narrow projection of x, and the shared ones, stored as one MLP, on x."""
    prefix = "block_sparse_moe."
    gate = layer.param(prefix + "gate.weight", [config.experts, config.hidden])
    ids, weights = mkc.route(
        mkc.linear(x, gate, dtype=mkc.F32),
        config.top,
        bias=layer.param(prefix + "gate.e_score_correction_bias", [config.experts], mkc.F32),
        renormalise=config.renormalise,
        scale=config.routed_scale,
    )
    latent = mkc.axis(config.latent)
    routed = mkc.expert_mlp(
        project(config, x, layer, prefix + "routed_expert_down_proj.weight", latent),
        ids,
        weights,
        gate=expert_matrix(config, layer, "w1", config.expert_mlp, config.latent),
        up=expert_matrix(config, layer, "w3", config.expert_mlp, config.latent),
        down=expert_matrix(config, layer, "w2", config.latent, config.expert_mlp),
        gate_cap=config.gate_cap,
        up_cap=config.up_cap,
    )
    routed = norm(config, routed, layer.param(prefix + "routed_expert_norm.weight", [latent]))
    up = layer.param(prefix + "routed_expert_up_proj.weight", [config.hidden, latent])
    shared = gated_mlp(config, x, layer, prefix + "shared_experts.", config.shared_mlp)
    return mkc.linear(routed, up) + shared


def expert_matrix(
    config: Config, layer: mkc.Layer, name: str, out: int, inner: int
) -> mkc.Tensor | tuple[mkc.Tensor, mkc.Tensor]:
    """One matrix of every expert; codes and scales where it is in MXFP4."""
    prefix = f"block_sparse_moe.experts.{{member}}.{name}.weight"
    if not config.mxfp4:
        return layer.param(prefix, [config.experts, out, inner])
    codes = [config.experts, out, inner // 2]
    scales = [config.experts, out, inner // 32]
    return (
        layer.param(prefix + "_packed", codes, mkc.DType.E2M1X2),
        layer.param(prefix + "_scale", scales, mkc.DType.E8M0),
    )


def project(
    config: Config, x: mkc.Tensor, layer: mkc.Layer, name: str, out: mkc.Axis
) -> mkc.Tensor:
    """A projection of the residual width."""
    return mkc.linear(x, layer.param(name, [out, config.hidden]))


def _rules(
    config: Mapping[str, Any], text: Mapping[str, Any], linear: Mapping[str, Any]
) -> list[keys.Rule]:
    """What a config may ask for and this model cannot do."""
    heads = text.get("num_attention_heads")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    kind = text.get("model_type", config.get("model_type", MODEL_TYPES[0]))
    usual: list[tuple[str, str, object]] = [
        ("another MLP activation", "hidden_act", "situ"),
        ("weights of another dtype", "dtype", "bfloat16"),
        ("rotary embeddings in latent attention", "mla_use_nope", True),
        ("latent attention without an output gate", "mla_use_output_gate", True),
        ("grouped routing", "num_expert_group", 1),
        ("grouped routing", "topk_group", 1),
        ("another choice of experts", "topk_method", "noaux_tc"),
        ("another score of experts", "moe_router_activation_func", "sigmoid"),
        ("layers without experts between those with them", "moe_layer_freq", 1),
        ("experts without a norm of their latent sum", "latent_moe_use_norm", True),
        ("layers that predict several tokens", "num_nextn_predict_layers", 0),
        ("heads that share keys", "num_key_value_heads", heads),
    ]
    rules = [(feature, key, text.get(key, fit), (fit,)) for feature, key, fit in usual]
    return [
        ("another architecture", "model_type", kind, MODEL_TYPES),
        ("one table for embedding and head", "tie_word_embeddings", tied, (False,)),
        *rules,
        (
            "a low-rank output gate of delta attention",
            "use_full_rank_gate",
            linear.get("use_full_rank_gate", True),
            (True,),
        ),
        ("another number of heads", "num_heads", linear.get("num_heads", heads), (heads,)),
    ]


def _layer_kinds(text: Mapping[str, Any], linear: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether its attention is latent; the config counts layers from 1."""
    count = keys.size(text, "num_hidden_layers")
    full = keys.numbers(linear, "full_attn_layers", least=1, most=count)
    delta = keys.numbers(linear, "kda_layers", least=1, most=count)
    if sorted((*full, *delta)) != list(range(1, count + 1)):
        raise mkc.ConfigValueError(
            key="kda_layers",
            got=list(delta),
            expected=f"the layers from 1 to {count} that are not in full_attn_layers",
        )
    return tuple(number in full for number in range(1, count + 1))


def _decay_bound(linear: Mapping[str, Any]) -> float:
    expected = "a negative number"
    value = keys.need(linear, "gate_lower_bound", expected)
    if type(value) not in (int, float) or not -keys.LARGEST_NUMBER < value < 0:
        raise mkc.ConfigValueError(key="gate_lower_bound", got=value, expected=expected)
    return float(value)


def _is_mxfp4(quantisation: object) -> bool:
    """Whether routed experts are in MXFP4. Raises `mkc.UnsupportedFeatureError` for other forms."""
    if quantisation is None:
        return False
    if not isinstance(quantisation, Mapping):
        raise mkc.ConfigValueError(
            key="quantization_config", got=quantisation, expected="an object"
        )
    rules: list[keys.Rule] = [
        ("another quantisation", "format", quantisation.get("format"), (MXFP4,))
    ]
    for group in quantisation.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        rules.append(("another quantisation", "format", group.get("format", MXFP4), (MXFP4,)))
        rules += [
            ("another quantisation", key, weights.get(key, fit), (fit,))
            for key, fit in MXFP4_WEIGHTS
        ]
        activations = group.get("input_activations")
        rules.append(("quantised activations", "input_activations", activations, (None,)))
    cache = quantisation.get("kv_cache_scheme")
    rules.append(("a quantised cache", "kv_cache_scheme", cache, (None,)))
    keys.refuse_unsupported(rules)
    return True


MODEL = mkc.Model(
    name="kimi_k3",
    load_config=Config.from_hf,
    decoder=decoder,
    default_config="configs/kimi_k3.json",
    small_config="configs/kimi_k3_small.json",
)
