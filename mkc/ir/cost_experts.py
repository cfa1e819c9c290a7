"""Cost of `mkc.ir.ops_experts`; see `mkc.ir.cost`.

How many experts a step loads depends on data. The cost is for routing that is uniform and
independent between rows; rows that are alike load fewer.
"""

from __future__ import annotations

from mkc.ir.cost import Cost
from mkc.ir.cost import Types
from mkc.ir.cost import blocks
from mkc.ir.facets import COST
from mkc.ir.infer_experts import expert_matrices
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Expected number of different experts that `rows` rows choose, `chosen` each."""
    return experts * (1.0 - (1.0 - chosen / experts) ** rows)


@COST.register(Route)
def _route(op: Route, operands: Types, states: Types, results: Types) -> Cost:
    # Score and selection key; one pass over the row for each expert that is taken.
    return Cost(vector_elements=(op.k + 2) * operands[0].elements)


@COST.register(ExpertMlp)
def _expert_mlp(op: ExpertMlp, operands: Types, states: Types, results: Types) -> Cost:
    x, ids, _, *matrices = operands
    experts, width, inner = expert_matrices(op, tuple(matrices))[0]
    rows, chosen = ids.shape
    loaded = distinct_experts(experts, chosen, rows)
    pairs = rows * chosen
    pushes = loaded * (2 * blocks(inner, width) + blocks(width, inner))
    return Cost(
        weight_bytes=round(loaded * sum(one.bytes for one in matrices) / experts),
        mxu_pushes=round(pushes),
        # The gated value, eight operations with caps; weight and sum of the outputs.
        vector_elements=pairs * (8 * width + 2 * inner),
        flops=2 * pairs * 3 * width * inner,
    )
