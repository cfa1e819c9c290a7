"""What every generated kernel is made of: streams, vector arithmetic, attention, exchanges.

Small activations live in VMEM buffers `[R, N]` f32 where R is the batch rounded up to 8; rows from
`batch` on hold finite values that nobody reads. Cursors are tuples of int32 scalars that the caller
carries through its loops. Every `pl.multiple_of` in here holds for all arguments that meet the
docstrings: the chip reads elsewhere when one does not.
"""

from __future__ import annotations

from mkc.codegen_pallas.support.accept import accept_greedy
from mkc.codegen_pallas.support.accept import block_tokens
from mkc.codegen_pallas.support.accept import kept_positions
from mkc.codegen_pallas.support.accept import next_positions
from mkc.codegen_pallas.support.argmax import local_argmax
from mkc.codegen_pallas.support.argmax import store_tokens
from mkc.codegen_pallas.support.attention import KvCursor
from mkc.codegen_pallas.support.attention import KvStream
from mkc.codegen_pallas.support.attention import attention
from mkc.codegen_pallas.support.attention import kv_drain
from mkc.codegen_pallas.support.attention import kv_prologue
from mkc.codegen_pallas.support.blocks import clear_blocks
from mkc.codegen_pallas.support.blocks import mix_blocks
from mkc.codegen_pallas.support.blocks import mix_stored
from mkc.codegen_pallas.support.blocks import mix_stream
from mkc.codegen_pallas.support.blocks import scale_heads
from mkc.codegen_pallas.support.blocks import store_block
from mkc.codegen_pallas.support.carried_rows import begin_sampled_rounds
from mkc.codegen_pallas.support.carried_rows import end_sampled_round
from mkc.codegen_pallas.support.carried_rows import end_sampled_rounds
from mkc.codegen_pallas.support.channel_delta import channel_delta_rule
from mkc.codegen_pallas.support.channel_delta import kept_channel_delta_rule
from mkc.codegen_pallas.support.conv import causal_conv
from mkc.codegen_pallas.support.delta import delta_rule
from mkc.codegen_pallas.support.distribution import Sampling
from mkc.codegen_pallas.support.dynamic_conv import dynamic_conv
from mkc.codegen_pallas.support.exchange import all_reduce_one_shot
from mkc.codegen_pallas.support.exchange import all_reduce_one_shot_finish
from mkc.codegen_pallas.support.exchange import all_reduce_one_shot_start
from mkc.codegen_pallas.support.exchange import all_reduce_two_phase
from mkc.codegen_pallas.support.exchange import all_reduce_two_phase_finish
from mkc.codegen_pallas.support.exchange import all_reduce_two_phase_start
from mkc.codegen_pallas.support.exchange import entry_barrier
from mkc.codegen_pallas.support.exchange import sharded_argmax
from mkc.codegen_pallas.support.experts import ExpertStore
from mkc.codegen_pallas.support.experts import expert_mlp
from mkc.codegen_pallas.support.experts import experts_start
from mkc.codegen_pallas.support.experts import left_shape
from mkc.codegen_pallas.support.gather import all_gather
from mkc.codegen_pallas.support.gather import all_gather_finish
from mkc.codegen_pallas.support.gather import all_gather_start
from mkc.codegen_pallas.support.kept import kept_conv
from mkc.codegen_pallas.support.kept import kept_delta_rule
from mkc.codegen_pallas.support.latent_attention import latent_attention
from mkc.codegen_pallas.support.launch import KernelSpec
from mkc.codegen_pallas.support.launch import Operand
from mkc.codegen_pallas.support.launch import abstract_arguments
from mkc.codegen_pallas.support.launch import build
from mkc.codegen_pallas.support.launch import operand_format
from mkc.codegen_pallas.support.levels import all_reduce_two_level
from mkc.codegen_pallas.support.levels import all_reduce_two_level_finish
from mkc.codegen_pallas.support.levels import all_reduce_two_level_start
from mkc.codegen_pallas.support.levels import all_reduce_two_step
from mkc.codegen_pallas.support.levels import all_reduce_two_step_finish
from mkc.codegen_pallas.support.levels import all_reduce_two_step_start
from mkc.codegen_pallas.support.markov import cut_drafts
from mkc.codegen_pallas.support.markov import markov_walk
from mkc.codegen_pallas.support.masks import fetch_masks
from mkc.codegen_pallas.support.masks import mask_tokens
from mkc.codegen_pallas.support.matmul import copy_out
from mkc.codegen_pallas.support.matmul import lanes
from mkc.codegen_pallas.support.matmul import narrow_matmul
from mkc.codegen_pallas.support.mxfp4 import mxfp4_product
from mkc.codegen_pallas.support.mxfp4 import packed_rows
from mkc.codegen_pallas.support.mxfp4 import spread
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.round_loop import begin_block_rounds
from mkc.codegen_pallas.support.round_loop import end_block_round
from mkc.codegen_pallas.support.rounds import begin_rounds
from mkc.codegen_pallas.support.rounds import end_round
from mkc.codegen_pallas.support.router import route
from mkc.codegen_pallas.support.rows_attention import rows_attention
from mkc.codegen_pallas.support.rows_attention import rows_drain
from mkc.codegen_pallas.support.rows_attention import rows_prologue
from mkc.codegen_pallas.support.sampled_accept import Exchange
from mkc.codegen_pallas.support.sampled_accept import accept_sampled
from mkc.codegen_pallas.support.sampled_walk import sampled_walk
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.streams import embed
from mkc.codegen_pallas.support.streams import stream_advance
from mkc.codegen_pallas.support.streams import stream_drain
from mkc.codegen_pallas.support.streams import stream_prologue
from mkc.codegen_pallas.support.streams import stream_wait
from mkc.codegen_pallas.support.tape import Choice
from mkc.codegen_pallas.support.tape import Tape
from mkc.codegen_pallas.support.tape import TapeCursor
from mkc.codegen_pallas.support.tape import refill
from mkc.codegen_pallas.support.tape import tape_drain
from mkc.codegen_pallas.support.tape import tape_prologue
from mkc.codegen_pallas.support.tape import tape_refill
from mkc.codegen_pallas.support.tape import tape_refill_cases
from mkc.codegen_pallas.support.tape import tape_wait
from mkc.codegen_pallas.support.taps import store_tap
from mkc.codegen_pallas.support.top_k import local_top_k
from mkc.codegen_pallas.support.top_k import sharded_top_k
from mkc.codegen_pallas.support.vector import exp
from mkc.codegen_pallas.support.vector import gelu_tanh
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import l2_norm
from mkc.codegen_pallas.support.vector import negate
from mkc.codegen_pallas.support.vector import per_head
from mkc.codegen_pallas.support.vector import positions_column
from mkc.codegen_pallas.support.vector import rms_norm
from mkc.codegen_pallas.support.vector import rotary
from mkc.codegen_pallas.support.vector import rotary_table
from mkc.codegen_pallas.support.vector import round_bf16
from mkc.codegen_pallas.support.vector import round_first_lanes
from mkc.codegen_pallas.support.vector import sigmoid
from mkc.codegen_pallas.support.vector import silu
from mkc.codegen_pallas.support.vector import slice_heads
from mkc.codegen_pallas.support.vector import softplus
from mkc.codegen_pallas.support.vector import tanh
from mkc.codegen_pallas.support.vector import vector
from mkc.codegen_pallas.support.walk import selector_walk
from mkc.ir.ops_experts import RouterScore

__all__ = [
    "channel_delta_rule",
    "clear_blocks",
    "latent_attention",
    "ExpertStore",
    "RouterScore",
    "expert_mlp",
    "experts_start",
    "left_shape",
    "cut_drafts",
    "markov_walk",
    "mix_blocks",
    "mix_stored",
    "mix_stream",
    "route",
    "mxfp4_product",
    "packed_rows",
    "spread",
    "scale_heads",
    "store_block",
    "kept_channel_delta_rule",
    "Exchange",
    "Sampling",
    "accept_sampled",
    "begin_sampled_rounds",
    "end_sampled_round",
    "end_sampled_rounds",
    "sampled_walk",
    "accept_greedy",
    "all_gather",
    "all_gather_finish",
    "all_gather_start",
    "begin_block_rounds",
    "block_tokens",
    "end_block_round",
    "kept_conv",
    "kept_delta_rule",
    "kept_positions",
    "next_positions",
    "rows_attention",
    "rows_drain",
    "rows_prologue",
    "store_tap",
    "refill",
    "narrow_matmul",
    "lanes",
    "copy_out",
    "causal_conv",
    "build",
    "abstract_arguments",
    "Operand",
    "KernelSpec",
    "Choice",
    "KvCursor",
    "KvStream",
    "Stream",
    "StreamCursor",
    "Tape",
    "TapeCursor",
    "View",
    "all_reduce_one_shot",
    "all_reduce_one_shot_finish",
    "all_reduce_one_shot_start",
    "all_reduce_two_level",
    "all_reduce_two_level_finish",
    "all_reduce_two_level_start",
    "all_reduce_two_step",
    "all_reduce_two_step_finish",
    "all_reduce_two_step_start",
    "all_reduce_two_phase",
    "all_reduce_two_phase_finish",
    "all_reduce_two_phase_start",
    "attention",
    "begin_rounds",
    "delta_rule",
    "dynamic_conv",
    "embed",
    "end_round",
    "entry_barrier",
    "exp",
    "fetch_masks",
    "gelu_tanh",
    "join",
    "kv_drain",
    "kv_prologue",
    "l2_norm",
    "local_argmax",
    "local_top_k",
    "sharded_top_k",
    "mask_tokens",
    "negate",
    "operand_format",
    "per_head",
    "positions_column",
    "rms_norm",
    "rotary",
    "rotary_table",
    "round_bf16",
    "round_first_lanes",
    "selector_walk",
    "sharded_argmax",
    "sigmoid",
    "silu",
    "slice_heads",
    "softplus",
    "store_tokens",
    "stream_advance",
    "stream_drain",
    "stream_prologue",
    "stream_wait",
    "tanh",
    "tape_drain",
    "tape_prologue",
    "tape_refill",
    "tape_refill_cases",
    "tape_wait",
    "vector",
]
