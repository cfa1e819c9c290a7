"""The source of phases of residual blocks; see `phases`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase

if TYPE_CHECKING:
    from mkc.codegen_pallas.phases import PhaseWriter


def clear_blocks(writer: PhaseWriter, phase: ClearBlocksPhase) -> list[str]:
    zeros = f"jnp.zeros((ROWS, {phase.blocks.width}), jnp.float32)"
    return [
        writer.store(phase.blocks, zeros),
        f"support.clear_blocks({writer.view(phase.count)})",
        f"return c._replace({phase.counter}=jnp.int32(0))",
    ]


def store_block(writer: PhaseWriter, phase: StoreBlockPhase) -> list[str]:
    return [
        "support.store_block(",
        f"    {writer.view(phase.blocks)},",
        f"    {writer.view(phase.count)},",
        f"    {writer.view(phase.residual)},",
        f"    c.{phase.counter},",
        f"    slots={phase.slots},",
        f"    period={phase.period},",
        ")",
        f"return c._replace({phase.counter}=c.{phase.counter} + 1)",
    ]


def latent_attention(writer: PhaseWriter, phase: LatentAttentionPhase) -> list[str]:
    program = writer.program
    return [
        "cursor = support.latent_attention(",
        f"    m.{phase.cache},",
        f"    c.{phase.cache},",
        f"    m.{phase.up},",
        f"    c.{phase.up},",
        f"    m.{phase.positions},",
        f"    q={writer.view(phase.q)},",
        f"    latent={writer.view(phase.latent)},",
        f"    shared={writer.view(phase.shared)},",
        f"    out={writer.view(phase.output)},",
        f"    heads={phase.heads},",
        f"    key_dim={phase.key_dim},",
        f"    shared_dim={phase.shared_dim},",
        f"    value_dim={phase.value_dim},",
        f"    rank={phase.latent.width},",
        "    batch=BATCH,",
        f"    rows_per_sequence={program.rows // program.batch},",
        f"    scale={phase.scale!r},",
        f"    rounds={phase.rounds},",
        ")",
        f"return c._replace({phase.cache}=cursor)",
    ]
