"""Parser of the text form, see `mkc.ir.text`.

It checks the form only; whether the graph makes sense is for `mkc.ir.verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import fields
from dataclasses import is_dataclass
from enum import Enum
from json import loads
from types import UnionType
from typing import Any
from typing import Union
from typing import get_args
from typing import get_origin
from typing import get_type_hints

from mkc.errors import TextError
from mkc.ir.facets import MNEMONICS
from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.ops import Op
from mkc.ir.register import BUILT_IN
from mkc.ir.text_tokens import Token
from mkc.ir.text_tokens import tokenize
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType

assert all(op_type.mnemonic in MNEMONICS for op_type in BUILT_IN), "import of register fills them"


def parse(text: str, *, file: str = "graph text") -> Graph:
    """The graph that `text` describes.

    Args:
      text: what `print_graph` wrote, or the same by hand; `#` starts a comment.
      file: name used in messages.

    Raises:
      TextError: the text does not have the form; names line and column.
    """
    return _Parser(text, file).graph()


class _Parser:
    """Recursive descent with one token of look-ahead."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.tokens = tokenize(text, file)
        self.at = 0

    # Words.

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def error(self, expected: str, token: Token | None = None) -> TextError:
        found = token or self.next
        return TextError(
            file=self.file,
            line=found.line,
            column=found.column,
            expected=expected,
            got=f"'{found.text}'" if found.kind != "end" else found.text,
        )

    def take(self, kind: str, expected: str) -> str:
        token = self.next
        if token.kind != kind:
            raise self.error(expected)
        self.at += 1
        return token.text

    def sees(self, text: str) -> bool:
        return self.next.kind in ("mark", "name") and self.next.text == text

    def takes(self, text: str) -> bool:
        """Takes `text` when it is next."""
        if self.sees(text):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.takes(text):
            raise self.error(f"'{text}'")

    def listed[T](self, element: Callable[[], T], close: str) -> tuple[T, ...]:
        """Elements between commas up to `close`, which is taken."""
        found: list[T] = []
        if self.takes(close):
            return ()
        while True:
            found.append(element())
            if self.takes(close):
                return tuple(found)
            if not self.takes(","):
                raise self.error(f"',' or '{close}'")

    def string(self) -> str:
        token = self.next
        return self._unquoted(self.take("string", "a string"), token)

    def _unquoted(self, text: str, token: Token) -> str:
        try:
            return str(loads(text))
        except ValueError as error:
            raise self.error("a string with JSON escapes", token) from error

    def name(self, expected: str = "a name") -> str:
        if self.next.kind == "string":
            return self.string()
        return self.take("name", expected)

    def integer(self, expected: str = "an integer") -> int:
        token = self.next
        text = self.take("number", expected)
        if not text.lstrip("-").isdigit():
            raise self.error(expected, token)
        return int(text)

    def sigil(self, kind: str, expected: str) -> str:
        token = self.next
        text = self.take(kind, expected)[1:]
        return self._unquoted(text, token) if text.startswith('"') else text

    def value_name(self) -> str:
        return self.sigil("value", "a value (%name)")

    def key(self) -> str:
        return self.sigil("key", "a key (@name)")

    def operand(self) -> str:
        if self.next.kind == "key":
            return self.key()
        return self.sigil("value", "an operand (%value or @parameter)")

    # Types.

    def tensor_type(self) -> TensorType:
        token = self.next
        word = self.take("name", "a type")
        if word not in list(DType):
            raise self.error(f"an element type ({', '.join(DType)})", token)
        self.expect("[")
        return TensorType(dtype=DType(word), axes=self.listed(self.axis, "]"))

    def axis(self) -> Axis:
        name = ""
        if self.next.kind in ("name", "string"):
            name = self.name()
            self.expect(":")
        if self.takes("("):
            self.expect(")")
            return Axis(parts=(), name=name)
        parts = [self.part()]
        while self.takes("+"):
            parts.append(self.part())
        return Axis(parts=tuple(parts), name=name)

    def part(self) -> Part:
        if self.next.kind == "part":
            text = self.take("part", "a part")
            count, unit = text.replace("h", "x").split("x")
            return Part(count=int(count), unit=int(unit), copyable="h" in text)
        return Part(count=self.integer("the size of an axis"))

    def typed(self) -> Value:
        name = self.value_name()
        self.expect(":")
        return Value(name=name, type=self.tensor_type())

    # Graph.

    def graph(self) -> Graph:
        self.expect("graph")
        name = self.string()
        self.expect("{")
        numbers = {word: self.setting(word) for word in ("rows", "batch", "context")}
        metadata: dict[str, str] = {}
        while self.takes("metadata"):
            key = self.string()
            self.expect("=")
            metadata[key] = self.string()
        inputs = []
        while self.takes("input"):
            inputs.append(self.typed())
        params: dict[str, Param] = {}
        while self.takes("param"):
            param = self.param()
            params[param.key] = param
        states: dict[str, State] = {}
        while self.takes("state"):
            state = self.state()
            states[state.key] = state
        body = self.block()
        outputs: dict[str, str] = {}
        while self.takes("output"):
            output = self.name()
            self.expect("=")
            outputs[output] = self.value_name()
        if not self.takes("}"):
            raise self.error("an operation, 'output' or '}'")
        if self.next.kind != "end":
            raise self.error("the end of the text")
        return Graph(
            name=name,
            **numbers,
            inputs=tuple(inputs),
            params=params,
            states=states,
            body=body,
            outputs=outputs,
            metadata=metadata,
        )

    def setting(self, word: str) -> int:
        self.expect(word)
        self.expect("=")
        return self.integer()

    def param(self) -> Param:
        key, pattern = self.key_and_pattern()
        return Param(key=key, pattern=pattern, type=self.tensor_type(), indices=self.indices())

    def state(self) -> State:
        token = self.next
        kind = self.name("a kind of state")
        if kind not in list(StateKind):
            raise self.error(f"a kind of state ({', '.join(StateKind)})", token)
        key, pattern = self.key_and_pattern()
        return State(
            kind=StateKind(kind),
            key=key,
            pattern=pattern,
            type=self.tensor_type(),
            indices=self.indices(),
        )

    def key_and_pattern(self) -> tuple[str, str]:
        """`@key:` or `@key "pattern":`; the pattern is the key when it is left out."""
        key = self.key()
        pattern = self.string() if self.next.kind == "string" else key
        self.expect(":")
        return key, pattern

    def indices(self) -> tuple[int, ...]:
        if not self.takes("indices"):
            return ()
        self.expect("(")
        return tuple(number for run in self.listed(self.progression, ")") for number in run)

    def progression(self) -> range:
        start = self.integer()
        if not self.takes(".."):
            return range(start, start + 1)
        stop = self.integer()
        return range(start, stop + 1, self.integer() if self.takes("by") else 1)

    def block(self) -> Block:
        items: list[Node | Repeat] = []
        while self.next.kind == "value" or (
            self.next.kind == "name" and self.next.text not in ("output", "yield")
        ):
            items.append(self.item())
        return Block(items=tuple(items))

    def item(self) -> Node | Repeat:
        results: list[Value] = []
        if self.next.kind == "value":
            results.append(self.typed())
            while self.takes(","):
                results.append(self.typed())
            self.expect("=")
        if self.takes("repeat"):
            return self.repeat(results)
        return self.node(tuple(results))

    def node(self, results: tuple[Value, ...]) -> Node:
        token = self.next
        mnemonic = self.take("name", "an operation")
        op_type = MNEMONICS.get(mnemonic)
        if op_type is None:
            raise self.error(f"a known operation ({', '.join(sorted(MNEMONICS))})", token)
        self.expect("(")
        operands = self.listed(self.operand, ")")
        states: tuple[str, ...] = ()
        if self.takes("states"):
            self.expect("(")
            states = self.listed(self.key, ")")
        op: Op = self.record(op_type, optional=True)
        return Node(
            op=op, operands=operands, states=states, results=results, location=self.location()
        )

    def repeat(self, results: list[Value]) -> Repeat:
        token = self.next
        name = self.name("the name of the region")
        self.expect("x")
        count = self.integer("the number of executions")
        arguments: tuple[tuple[Value, str], ...] = ()
        if self.takes("carry"):
            self.expect("(")
            arguments = self.listed(self.argument, ")")
        self.expect("{")
        body = self.block()
        yielded: list[str] = []
        if self.takes("yield"):
            yielded.append(self.value_name())
            while self.takes(","):
                yielded.append(self.value_name())
        self.expect("}")
        if not len(results) == len(arguments) == len(yielded):
            raise self.error(
                f"as many results ({len(results)}) as carries ({len(arguments)}) and yields "
                f"({len(yielded)})",
                token,
            )
        carries = tuple(
            Carry(initial=initial, argument=argument, yielded=inner, result=result)
            for (argument, initial), inner, result in zip(arguments, yielded, results, strict=True)
        )
        return Repeat(name=name, count=count, carries=carries, body=body, location=self.location())

    def argument(self) -> tuple[Value, str]:
        value = self.typed()
        self.expect("=")
        return value, self.value_name()

    def location(self) -> Location | None:
        if not self.takes("loc"):
            return None
        self.expect("(")
        file = self.string()
        self.expect(":")
        line = self.integer()
        self.expect(")")
        return Location(file=file, line=line)

    # Attributes.

    def record(self, record_type: type[Any], *, optional: bool = False) -> Any:
        """An instance of a dataclass; fields with defaults may be absent."""
        token = self.next
        hints = get_type_hints(record_type)
        known = {one.name: one for one in fields(record_type)}
        given: dict[str, Any] = {}

        def attribute() -> None:
            found = self.next
            name = self.take("name", "an attribute")
            if name not in known or name in given:
                rest = ", ".join(sorted(known.keys() - given.keys())) or "none are left"
                raise self.error(f"an attribute of {record_type.__name__} ({rest})", found)
            self.expect("=")
            given[name] = self.attribute(hints[name])

        if not optional or self.sees("{"):
            self.expect("{")
            self.listed(attribute, "}")
        for name, one in known.items():
            required = one.default is MISSING and one.default_factory is MISSING
            if required and name not in given:
                raise self.error(f"{record_type.__name__} with an attribute '{name}'", token)
        return record_type(**given)

    def attribute(self, hint: Any) -> Any:
        """A value of the annotated type."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return self.union(arguments)
        if origin is tuple:
            return self.sequence(arguments)
        if hint is type(None):
            self.expect("null")
            return None
        if hint is bool:
            if not (self.sees("true") or self.sees("false")):
                raise self.error("true or false")
            return self.take("name", "true or false") == "true"
        if hint is int:
            return self.integer()
        if hint is float:
            return float(self.take("number", "a number"))
        if hint is str:
            return self.string()
        if isinstance(hint, type) and issubclass(hint, Enum):
            return self.member(hint)
        assert isinstance(hint, type) and is_dataclass(hint), (
            f"attribute type {hint!r} has no text form"
        )
        return self.record(hint)

    def union(self, choices: tuple[Any, ...]) -> Any:
        """The first type of a union that the text fits."""
        start = self.at
        # `null` first: it would also pass for the name of an enumeration's member.
        ordered = sorted(choices, key=lambda one: one is not type(None))
        for choice in ordered[:-1]:
            try:
                return self.attribute(choice)
            except TextError:
                self.at = start
        return self.attribute(ordered[-1])

    def sequence(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.expect("(")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return self.listed(lambda: self.attribute(arguments[0]), ")")
        remaining = iter(arguments)
        close = self.next

        def element() -> Any:
            hint = next(remaining, None)
            if hint is None:
                raise self.error(f"{len(arguments)} elements")
            return self.attribute(hint)

        found = self.listed(element, ")")
        if len(found) != len(arguments):
            raise self.error(f"{len(arguments)} elements", close)
        return found

    def member(self, kind: type[Enum]) -> Enum:
        token = self.next
        written = self.name(f"a {kind.__name__}")
        for one in kind:
            if str(one.value) == written:
                return one
        raise self.error(f"one of {', '.join(str(one.value) for one in kind)}", token)
