"""mkc: a model graph, written in Python, compiled into one Pallas TPU kernel.

This is the language that models are written in; see docs/define-a-model.md.
"""

from __future__ import annotations

from mkc.errors import ConfigError
from mkc.errors import ConfigKeyError
from mkc.errors import ConfigValueError
from mkc.errors import MkcError
from mkc.errors import UnsupportedFeatureError
from mkc.ir.builder import KvCache
from mkc.ir.builder import Outputs
from mkc.ir.builder import StateRef
from mkc.ir.builder import Step
from mkc.ir.builder import Tensor
from mkc.ir.builder import apply
from mkc.ir.builder import param
from mkc.ir.builder import trace
from mkc.ir.draft import ContextStep
from mkc.ir.draft import Drafts
from mkc.ir.draft import DraftStep
from mkc.ir.draft import append_cache
from mkc.ir.draft import block_attention
from mkc.ir.draft import block_tokens
from mkc.ir.draft import cut_drafts
from mkc.ir.draft import dynamic_conv
from mkc.ir.draft import markov_walk
from mkc.ir.draft import selector_walk
from mkc.ir.draft import tap
from mkc.ir.draft import top_k
from mkc.ir.functional import add
from mkc.ir.functional import argmax
from mkc.ir.functional import attention
from mkc.ir.functional import cast
from mkc.ir.functional import causal_conv
from mkc.ir.functional import delta_rule
from mkc.ir.functional import embed
from mkc.ir.functional import exp
from mkc.ir.functional import gelu_tanh
from mkc.ir.functional import l2_norm
from mkc.ir.functional import linear
from mkc.ir.functional import merge_heads
from mkc.ir.functional import multiply
from mkc.ir.functional import negate
from mkc.ir.functional import next_token
from mkc.ir.functional import rms_norm
from mkc.ir.functional import rotary
from mkc.ir.functional import rotary_table
from mkc.ir.functional import scale
from mkc.ir.functional import sigmoid
from mkc.ir.functional import silu
from mkc.ir.functional import slice
from mkc.ir.functional import softplus
from mkc.ir.functional import split_heads
from mkc.ir.functional import split_parts
from mkc.ir.functional import subtract
from mkc.ir.functional import tanh
from mkc.ir.functional import unary
from mkc.ir.graph import Graph
from mkc.ir.graph import StateKind
from mkc.ir.layers import Layer
from mkc.ir.layers import layers
from mkc.ir.mixing import StoredBlocks
from mkc.ir.mixing import expert_mlp
from mkc.ir.mixing import latent_attention
from mkc.ir.mixing import latent_cache
from mkc.ir.mixing import mix_blocks
from mkc.ir.mixing import residual_blocks
from mkc.ir.mixing import route
from mkc.ir.mixing import scale_heads
from mkc.ir.mixing import situ
from mkc.ir.mixing import store_block
from mkc.ir.ops import Op
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.ir.types import concat_axes
from mkc.ir.types import heads
from mkc.model import Drafter
from mkc.model import DraftForm
from mkc.model import Model

BF16 = DType.BF16
F32 = DType.F32
I32 = DType.I32

__all__ = [
    "BF16",
    "F32",
    "I32",
    "Axis",
    "ConfigError",
    "ConfigKeyError",
    "ConfigValueError",
    "ContextStep",
    "DType",
    "DraftForm",
    "DraftStep",
    "Drafter",
    "Drafts",
    "Graph",
    "KvCache",
    "Layer",
    "MkcError",
    "Model",
    "Op",
    "Outputs",
    "Part",
    "StateKind",
    "StateRef",
    "Step",
    "StoredBlocks",
    "Tensor",
    "TensorType",
    "UnsupportedFeatureError",
    "add",
    "append_cache",
    "apply",
    "argmax",
    "attention",
    "axis",
    "block_attention",
    "block_tokens",
    "cast",
    "causal_conv",
    "concat_axes",
    "cut_drafts",
    "delta_rule",
    "dynamic_conv",
    "embed",
    "exp",
    "expert_mlp",
    "gelu_tanh",
    "heads",
    "l2_norm",
    "latent_attention",
    "latent_cache",
    "layers",
    "linear",
    "markov_walk",
    "merge_heads",
    "mix_blocks",
    "multiply",
    "negate",
    "next_token",
    "param",
    "residual_blocks",
    "rms_norm",
    "rotary",
    "rotary_table",
    "route",
    "scale",
    "scale_heads",
    "selector_walk",
    "sigmoid",
    "silu",
    "situ",
    "slice",
    "softplus",
    "split_heads",
    "split_parts",
    "store_block",
    "subtract",
    "tanh",
    "tap",
    "top_k",
    "trace",
    "unary",
]
