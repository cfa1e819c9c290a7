"""Compiles for a TPU what a backend with a scheme runs; prints JSON.

A process of its own runs it: `python -m tests.tpu_aot.rounds_aot TARGET BATCH`
"""

from __future__ import annotations

import json
import sys
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.codegen_pallas.aot import LAUNCH
from mkc.codegen_pallas.aot import other_operations
from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.ir.reference_ops import DTYPES
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import load_module
from mkc.runtime.kernel import mesh_of
from mkc.runtime.late_commit import LateCommit
from mkc.runtime.prefill import Prefill
from mkc.runtime.prefill_aot import COPY
from mkc.schedule.program import Operand
from mkc.targets import load_target
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import ROUNDS
from tests.runtime.rounds_backends import scheme_of


def bytes_of(operand: Operand) -> int:
    return prod(operand.shape) * operand.dtype.bytes


def figures(compiled: jax.stages.Compiled) -> dict[str, object]:
    """What is changed in place, and the largest array that is copied."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    copied = [prod(int(one) for one in shape.split(",")) for _, shape in COPY.findall(text)]
    return {
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "copied_elements": max(copied, default=0),
    }


def main(target: str, batch: int) -> None:
    scheme, hardware = scheme_of(LANE, batch=batch, sampling=True), load_target(target)
    lowered = lower_graph(scheme.graph, hardware, logits=True, rounds_per_launch=ROUNDS)
    program = lowered.program
    source = kernel_source(program, lowered.steps, target=hardware)
    description = topologies.get_topology_desc(platform="tpu", topology_name=target)
    mesh = mesh_of(list(description.devices)[: program.ranks])

    session = KernelSession(lowered=lowered, source=source, mesh=mesh, interpret=False)
    launch = session.step_function.lower(*load_module(source).abstract_arguments(mesh)).compile()
    text = launch.as_text()
    assert text is not None
    formats, _ = launch.input_formats
    relayouts = [
        operand.name
        for operand, wanted in zip(program.operands, formats, strict=True)
        if not np.array_equal(
            wanted.layout.major_to_minor,
            session.format_of(operand.name).layout.major_to_minor,
        )
    ]

    def shape(operand: Operand) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (program.ranks * operand.shape[0], *operand.shape[1:]),
            DTYPES[operand.dtype],
            sharding=session.format_of(operand.name),
        )

    commit = LateCommit(lowered=lowered, mesh=mesh)
    operands = {one.name: shape(one) for one in program.operands if one.updated}
    kept = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    states, rows = ({name: operands[name] for name in names} for names in commit.operands)
    late = commit.function.lower(states, rows, kept).compile()

    prefill = Prefill(lowered=lowered, mesh=mesh, graph=scheme.prefill)
    prompts = prefill.program(prefill.sizes[-1])
    sizes = {one.name: bytes_of(one) for one in program.operands}
    print(
        json.dumps(
            {
                "launch": figures(launch)
                | {"launches": text.count(LAUNCH), "other_ops": other_operations(text)},
                "relayouts": relayouts,
                "updated_bytes": sum(sizes[name] for name in operands),
                "commit": figures(late) | {"state_bytes": sum(sizes[name] for name in states)},
                "prefill": figures(prompts.compiled)
                | {"state_bytes": sum(sizes[one.name] for one in prompts.states)},
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
