"""Qwen3.8 text decoder (architecture `qwen3_5`): three gated delta net layers, one full attention.

The rounding of every step is that of the Hugging Face implementation with fused convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mkc

PREFIX = "model.language_model."
LINEAR = "linear_attention"
FULL = "full_attention"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
L2_EPS = 1e-6  # of the q and k normalisation; a constant of the architecture, not in its config
LARGEST_SIZE = 2**31 - 1  # positions and row numbers are i32
LARGEST_NUMBER = 3.4e38  # of an f32
FEWEST_TAPS = 2  # the newest input alone would leave a convolution without a state


@dataclass(frozen=True, kw_only=True)
class Config:
    """Dimensions of one checkpoint, from its config.json.

    Attributes:
      layer_types: `linear_attention` or `full_attention` for every layer.
      rotary_dim: rotated channels of a head; the rest passes unchanged.
      taps: inputs that the short convolution sees.
      tied: the LM head is the embedding table.
    """

    hidden: int
    mlp: int
    vocab: int
    layer_types: tuple[str, ...]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    rotary_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tied: bool
    max_positions: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """From the contents of a Hugging Face config.json, `text_config` nested or flat.

        Raises:
          mkc.ConfigError: a key is missing or wrong, or asks for what this model cannot do.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise mkc.ConfigValueError(key="text_config", got=text, expected="an object")
        _refuse_unsupported(config, text)
        rope = _rope(text)
        head_dim = _size(text, "head_dim")
        loaded = cls(
            hidden=_size(text, "hidden_size"),
            mlp=_size(text, "intermediate_size"),
            vocab=_size(text, "vocab_size"),
            layer_types=_layer_types(text),
            eps=_positive(text, "rms_norm_eps"),
            heads=_size(text, "num_attention_heads"),
            kv_heads=_size(text, "num_key_value_heads"),
            head_dim=head_dim,
            theta=_positive(rope, "rope_theta"),
            rotary_dim=_rotary_dim(text, rope, head_dim),
            key_heads=_size(text, "linear_num_key_heads"),
            value_heads=_size(text, "linear_num_value_heads"),
            key_dim=_size(text, "linear_key_head_dim"),
            value_dim=_size(text, "linear_value_head_dim"),
            taps=_size(text, "linear_conv_kernel_dim", least=FEWEST_TAPS),
            tied=_flag(text, "tie_word_embeddings", config.get("tie_word_embeddings", False)),
            max_positions=_size(text, "max_position_embeddings"),
        )
        _check_groups("num_attention_heads", loaded.heads, "num_key_value_heads", loaded.kv_heads)
        _check_groups(
            "linear_num_value_heads", loaded.value_heads, "linear_num_key_heads", loaded.key_heads
        )
        return loaded


def decoder(config: Config, step: mkc.Step) -> mkc.Outputs:
    """One decode step for `step.rows` token rows."""
    step.limit_context(config.max_positions)
    vocab = mkc.axis(config.vocab, "vocabulary")
    table = mkc.param(PREFIX + "embed_tokens.weight", [vocab, config.hidden])
    cos, sin = mkc.rotary_table(step.positions, theta=config.theta, dim=config.rotary_dim)
    h = mkc.embed(step.tokens, table)
    for layer in mkc.layers(len(config.layer_types), prefix=PREFIX + "layers.{index}."):
        x = norm(config, h, layer.param("input_layernorm.weight", [config.hidden]))
        if config.layer_types[layer.index] == LINEAR:
            h = h + linear_attention(config, x, layer)
        else:
            h = h + full_attention(config, x, layer, step, cos, sin)
        x = norm(config, h, layer.param("post_attention_layernorm.weight", [config.hidden]))
        h = h + mlp(config, x, layer)
        mkc.tap(layer, "output", h)
    h = norm(config, h, mkc.param(PREFIX + "norm.weight", [config.hidden]))
    head = table if config.tied else mkc.param("lm_head.weight", [vocab, config.hidden])
    return mkc.next_token(h, head)


def norm(config: Config, x: mkc.Tensor, weight: mkc.Tensor) -> mkc.Tensor:
    """The norm of layers, queries and keys: weight 1 + w, one rounding."""
    return mkc.rms_norm(x, weight, eps=config.eps, zero_centred=True)


def linear_attention(config: Config, x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """Gated delta net: short convolution, delta rule on a recurrent state, gated norm."""
    keys = mkc.heads(config.key_heads, config.key_dim, "key_heads")
    values = mkc.heads(config.value_heads, config.value_dim, "value_heads")
    gates = mkc.heads(config.value_heads, 1, "value_heads")
    channels = mkc.concat_axes([keys, keys, values], "qkv_heads")

    qkv = project(config, x, layer, "linear_attn.in_proj_qkv.weight", channels)
    z = project(config, x, layer, "linear_attn.in_proj_z.weight", values)
    b = project(config, x, layer, "linear_attn.in_proj_b.weight", gates)
    a = project(config, x, layer, "linear_attn.in_proj_a.weight", gates)

    qkv = mkc.causal_conv(
        qkv,
        layer.param("linear_attn.conv1d.weight", [channels, 1, config.taps]),
        state=layer.state("linear_attn.conv", "conv", [config.taps - 1, channels]),
        activation="silu",
    )
    q, k, v = (mkc.split_heads(part) for part in mkc.split_parts(qkv))
    q = mkc.scale(mkc.l2_norm(q, eps=L2_EPS), config.key_dim**-0.5)
    k = mkc.l2_norm(k, eps=L2_EPS)

    rate = mkc.negate(mkc.exp(layer.param("linear_attn.A_log", [gates], mkc.F32)))
    step_size = mkc.add(a, layer.param("linear_attn.dt_bias", [gates]), dtype=mkc.F32)
    o = mkc.delta_rule(
        q,
        k,
        v,
        beta=mkc.sigmoid(b),
        decay=mkc.softplus(step_size) * rate,
        state=layer.state(
            "linear_attn.recurrent",
            "recurrent",
            [gates, config.key_dim, config.value_dim],
            mkc.F32,
        ),
    )
    weight = layer.param("linear_attn.norm.weight", [config.value_dim], mkc.F32)
    o = mkc.rms_norm(o, weight, eps=config.eps, rounding="twice")
    gate = mkc.silu(mkc.split_heads(z), dtype=mkc.F32)
    o = mkc.merge_heads(mkc.multiply(o, gate, dtype=mkc.BF16))
    return mkc.linear(o, layer.param("linear_attn.out_proj.weight", [config.hidden, values]))


def full_attention(
    config: Config,
    x: mkc.Tensor,
    layer: mkc.Layer,
    step: mkc.Step,
    cos: mkc.Tensor,
    sin: mkc.Tensor,
) -> mkc.Tensor:
    """Grouped-query attention with normalised q and k and a sigmoid gate on its output."""
    dim = config.head_dim
    kv = mkc.heads(config.kv_heads, dim, "kv_heads")
    # Each head's rows of q_proj are its query, then its gate.
    paired = mkc.heads(config.heads, 2 * dim, "heads")
    both = mkc.split_heads(project(config, x, layer, "self_attn.q_proj.weight", paired))
    k = mkc.split_heads(project(config, x, layer, "self_attn.k_proj.weight", kv))
    v = mkc.split_heads(project(config, x, layer, "self_attn.v_proj.weight", kv))
    q, gate = mkc.slice(both, 0, dim), mkc.slice(both, dim, dim)
    q = norm(config, q, layer.param("self_attn.q_norm.weight", [dim]))
    k = norm(config, k, layer.param("self_attn.k_norm.weight", [dim]))
    o = mkc.attention(
        mkc.rotary(q, cos, sin),
        mkc.rotary(k, cos, sin),
        v,
        positions=step.positions,
        cache=layer.kv_cache("self_attn.kv", config.kv_heads, dim),
        scale=dim**-0.5,
    )
    o = mkc.merge_heads(o * mkc.sigmoid(gate))
    heads = mkc.heads(config.heads, dim, "heads")
    return mkc.linear(o, layer.param("self_attn.o_proj.weight", [config.hidden, heads]))


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


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Names what a config asks for and this model cannot do."""
    kind = text.get("model_type", config.get("model_type", MODEL_TYPES[0]))
    rules: tuple[tuple[str, str, object, tuple[object, ...]], ...] = (
        ("another architecture", "model_type", kind, MODEL_TYPES),
        ("biases in attention", "attention_bias", text.get("attention_bias", False), (False,)),
        ("another MLP activation", "hidden_act", text.get("hidden_act", "silu"), ("silu",)),
        (
            "attention without an output gate",
            "attn_output_gate",
            text.get("attn_output_gate", True),
            (True,),
        ),
        (
            "another gate of the delta net's norm",
            "output_gate_type",
            text.get("output_gate_type", "swish"),
            ("swish", "silu"),
        ),
        (
            "a recurrent state of another dtype",
            "mamba_ssm_dtype",
            text.get("mamba_ssm_dtype", "float32"),
            ("float32",),
        ),
        (
            "weights of another dtype",
            "dtype",
            text.get("dtype", text.get("torch_dtype", "bfloat16")),
            ("bfloat16",),
        ),
        (
            "quantised weights",
            "quantization_config",
            text.get("quantization_config", config.get("quantization_config")),
            (None,),
        ),
    )
    for feature, key, got, supported in rules:
        if got not in supported:
            listed = " or ".join("no such key" if one is None else repr(one) for one in supported)
            raise mkc.UnsupportedFeatureError(feature=feature, key=key, got=got, supported=listed)


def _need(config: Mapping[str, Any], key: str, expected: str) -> Any:
    if key not in config:
        raise mkc.ConfigKeyError(key=key, expected=expected)
    return config[key]


def _size(config: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
    value = _need(config, key, expected)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    if value > LARGEST_SIZE:
        expected = f"{expected}, at most {LARGEST_SIZE}"
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    expected = "a positive number that is finite in f32"
    value = _need(config, key, expected)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < LARGEST_NUMBER:  # a NaN is in no range
        raise mkc.ConfigValueError(key=key, got=value, expected=expected)
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: object) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise mkc.ConfigValueError(key=key, got=value, expected="true or false")
    return value


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count = _size(text, "num_hidden_layers")
    expected = f"a list of {count} entries, each '{LINEAR}' or '{FULL}'"
    kinds = _need(text, "layer_types", expected)
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise mkc.ConfigValueError(
            key="layer_types",
            got=kinds,
            expected=expected,
            hint="Make it as long as num_hidden_layers says",
        )
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise mkc.UnsupportedFeatureError(
                feature=f"layers of type {kind!r}",
                key="layer_types",
                got=kind,
                supported=f"'{LINEAR}' and '{FULL}'",
            )
    return tuple(kinds)


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    expected = "an object with rope_type, rope_theta and partial_rotary_factor"
    rope = _need(text, "rope_parameters", expected)
    if not isinstance(rope, Mapping):
        raise mkc.ConfigValueError(key="rope_parameters", got=rope, expected=expected)
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise mkc.UnsupportedFeatureError(
            feature="scaled rotary embeddings", key="rope_type", got=kind, supported="'default'"
        )
    return rope


def _rotary_dim(text: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> int:
    key = "partial_rotary_factor"
    factor = _positive(rope if key in rope else text, key)
    rotated = int(head_dim * factor)
    if factor > 1 or rotated < 2 or rotated % 2:
        raise mkc.ConfigValueError(
            key=key,
            got=factor,
            expected=f"a factor of at most 1 that rotates an even number of {head_dim} channels",
        )
    return rotated


def _check_groups(key: str, count: int, group_key: str, groups: int) -> None:
    if count % groups:
        raise mkc.ConfigValueError(
            key=key, got=count, expected=f"a multiple of {group_key}, which is {groups}"
        )


MODEL = mkc.Model(
    name="qwen38",
    load_config=Config.from_hf,
    decoder=decoder,
    default_config="configs/qwen38_27b.json",
    small_config="configs/qwen38_small.json",
)
