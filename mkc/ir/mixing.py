"""What a model's author calls for `mkc.ir.ops_mixing` and `mkc.ir.ops_experts`."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from mkc.ir import cost_experts
from mkc.ir import cost_mixing
from mkc.ir import infer_experts
from mkc.ir import infer_mixing
from mkc.ir.builder import KvCache
from mkc.ir.builder import Tensor
from mkc.ir.builder import apply
from mkc.ir.functional import cast
from mkc.ir.functional import multiply
from mkc.ir.functional import scale
from mkc.ir.functional import sigmoid
from mkc.ir.functional import tanh
from mkc.ir.graph import StateKind
from mkc.ir.layers import Layer
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route
from mkc.ir.ops_experts import RouterScore
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part

REGISTERED = (cost_experts, cost_mixing, infer_experts, infer_mixing)  # for what they register

type Matrix = Tensor | tuple[Tensor, Tensor]  # in MXFP4 codes and scales


@dataclass(frozen=True, kw_only=True)
class StoredBlocks:
    """Residual vectors that were stored in this step.

    Attributes:
      blocks: [rows, slots, n].
      count: i32 [rows], how often `store_block` was called.
      period: of that many calls the first one stores.
    """

    blocks: Tensor
    count: Tensor
    period: int


def latent_cache(layer: Layer, name: str, *, rank: int, shared: int) -> KvCache:
    """Latents and shared keys of a layer, bf16 [context, 1, rank] and [context, 1, shared]."""
    context = layer.trace.context
    one = Axis(parts=(Part(count=1, copyable=True),), name="heads")
    return KvCache(
        key=layer.state(f"{name}.latent", StateKind.KV_CACHE, (context, one, rank)),
        value=layer.state(f"{name}.shared_key", StateKind.KV_CACHE, (context, one, shared)),
    )


def latent_attention(
    q: Tensor,
    shared_q: Tensor,
    latent: Tensor,
    shared_k: Tensor,
    up: Tensor,
    *,
    positions: Tensor,
    cache: KvCache,
    scale: float,
) -> Tensor:
    """Attention whose keys and values are projections of a latent vector, and a shared key.

    Args:
      q, shared_q: [rows, heads, d] and [rows, heads, s]: what meets a head's key and the shared
        one.
      latent, shared_k: [rows, rank], [rows, s].
      up: [heads * (d + dv), rank], of each head its key, then its value.

    Returns:
      [rows, heads, dv].
    """
    states = (cache.key, cache.value)
    operands = (q, shared_q, latent, shared_k, up, positions)
    (result,) = apply(LatentAttention(scale=scale), *operands, states=states)
    return result


def scale_heads(x: Tensor, factor: Tensor) -> Tensor:
    """x [rows, heads, n], each head times its entry of `factor` [heads]."""
    (result,) = apply(ScaleHeads(), x, factor)
    return result


def residual_blocks(x: Tensor, slots: int, *, period: int = 1) -> StoredBlocks:
    """Room for `slots` vectors like x [rows, n], none of them stored.

    Args:
      period: `store_block` stores the first of every `period` vectors that it is given.
    """
    blocks, count = apply(ResidualBlocks(slots=slots), x)
    return StoredBlocks(blocks=blocks, count=count, period=period)


def store_block(stored: StoredBlocks, x: Tensor) -> tuple[StoredBlocks, Tensor]:
    """Stores the residual stream x [rows, n] behind the others when its turn has come.

    Called by every layer, so that layers which store and those which do not are alike.

    Returns:
      What is stored then, and the stream that goes on: zeros when x was stored, else x.
    """
    op = StoreBlock(period=stored.period)
    blocks, count, stream = apply(op, stored.blocks, stored.count, x)
    return replace(stored, blocks=blocks, count=count), stream


def mix_blocks(
    stored: StoredBlocks, x: Tensor, *, norm: Tensor, projection: Tensor, eps: float
) -> Tensor:
    """A sum of the stored vectors and x, weighted by the softmax of their scores.

    Args:
      norm, projection: [n], [1, n]: a score is the projection of the normalised vector.
    """
    op = MixBlocks(eps=eps, period=stored.period)
    (result,) = apply(op, stored.blocks, stored.count, x, norm, projection)
    return result


def route(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    score: RouterScore | str = RouterScore.SIGMOID,
    renormalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Experts of each row, i32 [rows, k], and their weights, f32 [rows, k].

    Args:
      logits: [rows, experts].
      bias: f32 [experts], added for the choice only.
      renormalise: divides the weights by their sum.
    """
    op = Route(k=k, score=RouterScore(score), renormalise=renormalise, scale=scale)
    ids, weights = apply(op, logits, *(() if bias is None else (bias,)))
    return ids, weights


def expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    gate_cap: float | None = None,
    up_cap: float | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts' gated MLPs of x [rows, n].

    Args:
      ids, weights: from `route`.
      gate, up, down: [experts, w, n], [experts, w, n], [experts, n, w].
    """
    matrices = [
        one
        for matrix in (gate, up, down)
        for one in (matrix if isinstance(matrix, tuple) else (matrix,))
    ]
    (result,) = apply(ExpertMlp(gate_cap=gate_cap, up_cap=up_cap), x, ids, weights, *matrices)
    return result


def situ(gate: Tensor, up: Tensor, *, gate_cap: float, up_cap: float) -> Tensor:
    """SwiGLU with soft caps, c tanh(z / c), on its linear factors; in f32, rounded like `gate`."""

    def capped(x: Tensor, cap: float) -> Tensor:
        return scale(tanh(scale(cast(x, DType.F32), 1.0 / cap)), cap)

    product = capped(gate, gate_cap) * sigmoid(gate, dtype=DType.F32)
    return multiply(product, capped(up, up_cap), dtype=gate.dtype)
