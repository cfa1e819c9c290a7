"""What `docs/graph-ir.md` says about the graph IR is true."""

from __future__ import annotations

from pathlib import Path
from re import DOTALL
from re import findall

import mkc
from mkc.ir.facets import MNEMONICS
from mkc.ir.register import BUILT_IN
from mkc.ir.register import unregister_op
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.verify import findings

DOCS = Path(__file__).parents[2] / "docs" / "graph-ir.md"
TEXT = DOCS.read_text(encoding="utf-8")


def test_the_table_lists_every_op() -> None:
    table = TEXT.split("## Operations")[1].split("## Verifier")[0]
    first_columns = "".join(line.split("|")[1] for line in table.splitlines() if line[:3] == "| `")
    assert sorted(findall(r"`(\w+)`", first_columns)) == sorted(op.mnemonic for op in BUILT_IN)


def test_the_modules_exist() -> None:
    table = TEXT.split("## Values")[0]
    names = findall(r"`(\w+\.py)`", table)
    assert len(names) > 10
    for name in names:
        assert (DOCS.parents[1] / "mkc" / "ir" / name).is_file(), name


def test_the_text_is_a_graph() -> None:
    (text,) = findall(r"```\n(graph .*?)```", TEXT, DOTALL)
    assert print_graph(parse(text)) == text
    # The example has an input that no op of it reads, and nothing else to object to.
    assert findings(parse(text)) == []


def test_the_op_of_your_own_works() -> None:
    (source,) = findall(r"```python\n(.*?)```", TEXT, DOTALL)
    scope: dict[str, object] = {"__name__": __name__}
    exec(compile(source, str(DOCS), "exec", dont_inherit=True), scope)
    clamp = scope["Clamp"]
    assert isinstance(clamp, type)

    def decoder(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [16, 8])
        (h,) = mkc.apply(clamp(low=-1.0, high=1.0), mkc.embed(step.tokens, table))
        return mkc.next_token(h, table)

    try:
        graph = mkc.trace(decoder, name="clamped", batch=1, context=16)
        assert parse(print_graph(graph)) == graph
        assert findings(graph) == []
    finally:
        unregister_op(clamp)
    assert "my.clamp" not in MNEMONICS
