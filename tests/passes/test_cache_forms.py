"""Latent or expanded caches: what either costs a rank, and what is said of the choice."""

from __future__ import annotations

import pytest

from mkc.errors import UnsupportedGraphError
from mkc.ir.cache_form import with_cache_form
from mkc.ir.graph import Graph
from mkc.ir.ops_mixing import CacheForm
from mkc.passes.cache_forms import form_cost
from mkc.passes.cache_forms import record_cache_form
from mkc.passes.p10_shard import Shard
from mkc.passes.packed_queries import pack_queries
from mkc.schedule.decisions import Decision
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target
from tests.passes.kimi import MANY_DEVICES
from tests.passes.kimi import full_kimi
from tests.passes.kimi import small_kimi
from tests.passes.lowering import full_size

TARGET = load_target(MANY_DEVICES)


def of_a_rank(graph: Graph, ranks: int) -> Graph:
    return Shard(ranks=ranks).apply(graph, DecisionLog(), target=TARGET).graph


def decision(graph: Graph) -> Decision:
    log = DecisionLog()
    record_cache_form(graph, TARGET, log)
    (found,) = log.decisions
    return found


def test_bytes_of_kimi_on_32_devices() -> None:
    """24 layers with 96 heads, three of them on a rank: 576 numbers of a position are latents, and
    320 those of a head."""
    graph = of_a_rank(full_kimi(), 32)
    up = 3 * 256 * 512 * 2
    for form, numbers in ((CacheForm.LATENT, 576), (CacheForm.EXPANDED, 3 * 320)):
        found = form_cost(graph, form, TARGET)
        assert found.bytes == 24 * (numbers * 2 * (4096 + 1) + up)
    latent, expanded = (form_cost(graph, form, TARGET) for form in CacheForm)
    assert latent.us < expanded.us
    found = decision(graph)
    assert found.chosen == f"latent: {latent}"
    assert found.rejected == {"expanded": str(expanded)}
    assert "less" not in found.because


def test_the_more_ranks_the_smaller_the_heads_of_one() -> None:
    """Latents are on every rank; where expanded ones are cheaper, the decision says it."""
    one, many = (of_a_rank(small_kimi(layers=4, latent=(4,), dense=1), ranks) for ranks in (1, 4))
    latent = [form_cost(graph, CacheForm.LATENT, TARGET).bytes for graph in (one, many)]
    expanded = [form_cost(graph, CacheForm.EXPANDED, TARGET).bytes for graph in (one, many)]
    (up,) = [param.type.bytes for key, param in one.params.items() if "kv_b_proj" in key]
    assert expanded[1] == expanded[0] / 4
    assert latent[0] - latent[1] == up * 3 / 4
    assert "would cost less" not in decision(one).because
    assert "would cost less" in decision(many).because


def test_an_expanded_cache_is_refused() -> None:
    """Nothing is recorded of it, and no kernel is made."""
    graph = small_kimi(layers=4, latent=(4,), dense=1)
    expanded = with_cache_form(graph, CacheForm.EXPANDED)
    log = DecisionLog()
    record_cache_form(expanded, TARGET, log)
    assert log.decisions == []
    with pytest.raises(UnsupportedGraphError, match="its cache is expanded"):
        pack_queries(expanded)


def test_a_model_without_latents_has_no_such_decision() -> None:
    log = DecisionLog()
    record_cache_form(full_size(), TARGET, log)
    assert log.decisions == []
