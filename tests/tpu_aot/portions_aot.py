"""Compiles for a TPU what writes portions of weights into operands; prints JSON.

A process of its own runs it: `python -m tests.tpu_aot.portions_aot TARGET`
"""

from __future__ import annotations

import json
import sys
from math import prod

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.runtime.filling import writing_program
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.layout import WEIGHT_ROLES
from mkc.runtime.pack import DTYPES
from mkc.targets import load_target
from tests.goldens import golden_case

ROWS = 1 << 12  # of an operand; the weights of the golden case are too small for portions
PORTION_ROWS = ROWS // 16


def main(target: str) -> None:
    graph = golden_case("qwen38_lane").graph(batch=1)
    lowered = lower_graph(graph, load_target(target))
    program = lowered.program
    source = kernel_source(program, lowered.steps, target=load_target(target))
    description = topologies.get_topology_desc(platform="tpu", topology_name=target)
    mesh = mesh_of(list(description.devices)[: program.ranks])
    session = KernelSession(lowered=lowered, source=source, mesh=mesh, interpret=False)
    row = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    found = {}
    for operand in program.operands:
        if operand.role not in WEIGHT_ROLES:
            continue
        format_ = session.format_of(operand.name)
        ranks = 1 if operand.role == "table" else program.ranks
        dtype = np.dtype(DTYPES[operand.dtype])
        whole, portion = (
            jax.ShapeDtypeStruct((ranks * rows, *operand.shape[1:]), dtype, sharding=format_)
            for rows in (ROWS, PORTION_ROWS)
        )
        compiled = writing_program(format_).lower(whole, portion, row).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        taken, _ = compiled.input_formats
        layout = taken[0].layout
        assert layout is not None
        found[operand.role] = {
            "bytes": ROWS * prod(operand.shape[1:]) * dtype.itemsize,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "in_order": list(layout.major_to_minor) == list(range(len(operand.shape))),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
