"""Compiles for a TPU what a session launches, and what is compiled ahead of time; prints JSON.

A process of its own runs it: `python -m tests.tpu_aot.session_aot TARGET BATCH ROUNDS`
"""

from __future__ import annotations

import json
import sys
from math import prod

import numpy as np
from jax.experimental import topologies

from mkc.codegen_pallas.aot import LAUNCH
from mkc.codegen_pallas.aot import other_operations
from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.ir.token_masks import with_token_masks
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import load_module
from mkc.runtime.kernel import mesh_of
from mkc.targets import load_target
from tests.goldens import golden_case


def main(target: str, batch: int, rounds: int) -> None:
    graph = with_token_masks(golden_case("qwen38_lane").graph(batch=batch))
    lowered = lower_graph(graph, load_target(target), logits=True, rounds_per_launch=rounds)
    source = kernel_source(lowered.program, lowered.steps, target=load_target(target))
    description = topologies.get_topology_desc(platform="tpu", topology_name=target)
    mesh = mesh_of(list(description.devices)[: lowered.program.ranks])

    session = KernelSession(lowered=lowered, source=source, mesh=mesh, interpret=False)
    ahead = load_module(source)
    compiled = [
        function.lower(*ahead.abstract_arguments(mesh)).compile()
        for function in (session.step_function, ahead.build(mesh))
    ]
    texts = [one.as_text() for one in compiled]
    memory = compiled[0].memory_analysis()
    assert memory is not None
    formats, _ = compiled[0].input_formats
    placed = [session.format_of(one.name) for one in lowered.program.operands]
    print(
        json.dumps(
            {
                "same": texts[0] == texts[1],
                "launches": texts[0].count(LAUNCH),
                "other_ops": other_operations(texts[0]),
                "aliased_bytes": memory.alias_size_in_bytes,
                "updated_bytes": sum(
                    prod(one.shape) * one.dtype.bytes
                    for one in lowered.program.operands
                    if one.updated
                ),
                "relayouts": [
                    operand.name
                    for operand, wanted, given in zip(
                        lowered.program.operands, formats, placed, strict=True
                    )
                    if not np.array_equal(wanted.layout.major_to_minor, given.layout.major_to_minor)
                    or not wanted.sharding.is_equivalent_to(given.sharding, len(operand.shape))
                ],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
