"""Compiles what saves, restores and clears slots for a TPU; prints JSON.

A process of its own runs it:

`python -m tests.tpu_aot.slots_aot TARGET BATCH ROWS`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.driver import lower_graph
from mkc.ir.reference_ops import DTYPES
from mkc.runtime.backends.slots import SlotAccess
from mkc.runtime.prefill_aot import COPY
from mkc.runtime.state import StateLayout
from mkc.targets import load_target
from models.qwen38 import MODEL

CONFIG = Path(__file__).parents[2] / "models" / MODEL.default_config
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def main(target: str, batch: int, rows: int) -> None:
    graph = MODEL.trace(json.loads(CONFIG.read_text()), batch=batch, context=4096)
    lowered = lower_graph(graph, load_target(target))
    program = lowered.program
    layout = StateLayout(
        program=program, sharded=lowered.steps.sharded, streams=lowered.residency.streams
    )
    states = lowered.steps.sharded.full.states
    kinds = {layout.operand_of(key): one.kind for key, one in states.items()}
    description = topologies.get_topology_desc(platform="tpu", topology_name=target)
    mesh = Mesh(np.array(list(description.devices)[: program.ranks]), ("tp",))
    slots = SlotAccess(mesh=mesh, kinds=kinds, batch=batch)

    divided = NamedSharding(mesh, PartitionSpec("tp"))
    operands = {
        one.name: jax.ShapeDtypeStruct(
            (program.ranks * one.shape[0], *one.shape[1:]), DTYPES[one.dtype], sharding=divided
        )
        for one in program.operands
        if one.updated
    }
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    take = slots.take(rows).lower(operands, scalar, scalar).compile()
    parts = {
        name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=take.output_shardings[name])
        for name, one in jax.eval_shape(slots.take(rows), operands, scalar, scalar).items()
    }
    put = slots.put.lower(operands, scalar, scalar, parts).compile()
    found = {
        "state_bytes": sum(
            one.size * one.dtype.itemsize // program.ranks for one in operands.values()
        )
    }
    clear = slots.clear.lower(operands, scalar).compile()
    for name, compiled in (("take", take), ("put", put), ("clear", clear)):
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert hlo is not None
        found[name] = {
            "temporary_bytes": memory.temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "copied_elements": max(
                (int(np.prod([int(n) for n in one[1].split(",")])) for one in COPY.findall(hlo)),
                default=0,
            ),
            "collectives": [one for one in COLLECTIVES if one in hlo],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
