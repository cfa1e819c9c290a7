"""The tasks of the small model: generated questions whose answers can be checked.

Everything is drawn from a `random.Random`, so a seed decides what comes. An *item* is what a
question is about, such as the two numbers of a sum; a hash of it decides whether it belongs to
training or to evaluation. The wording is chosen apart from the item.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from datetime import timedelta
from hashlib import sha256
from random import Random
from typing import Any
from typing import Literal

from examples import tiny_words as words

type Check = Literal["exact", "contains", "json", "tool_call"]
type Message = dict[str, Any]

HELD_OUT = 8  # one item in so many is for evaluation
LARGEST = 99  # of numbers in sums and lists
LONGEST_LIST = 8  # things to count
MONTH_ENDS = 0.15  # of the dates, besides those that come by chance
MOST_DAYS = 14  # from one weekday to another


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question with its answer.

    Attributes:
      task: which kind.
      item: what it is about; the split depends on task and item.
      messages: from the user's question on, without the answer.
      answer: the assistant's message.
      check: how an answer is compared with `expected`.
      thought: what the model thinks before it; nothing where that does not help.
      tools: names in `TOOLS` that it needs; they may be called.
    """

    task: str
    item: str
    messages: tuple[Message, ...]
    answer: Message
    check: Check
    expected: Any
    thought: str = ""
    tools: tuple[str, ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether the item is for evaluation; small talk has no items and is never."""
        return bool(self.item) and is_held_out(self.task, self.item)


def is_held_out(task: str, item: str) -> bool:
    digest = sha256(f"{task}/{item}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT == 0


def draw(rng: Random, task: str, *, held_out: bool) -> Exchange:
    """An exchange of a task whose item is on the wanted side of the split."""
    while True:
        exchange = TASKS[task](rng)
        if exchange.held_out == held_out:
            return exchange


def _plain(
    task: str,
    item: object,
    question: str,
    answer: str,
    thought: str = "",
    *,
    check: Check = "exact",
) -> Exchange:
    return Exchange(
        task=task,
        item=str(item) if item is not None else "",
        messages=({"role": "user", "content": question},),
        answer={"role": "assistant", "content": answer},
        thought=thought,
        check=check,
        expected=json.loads(answer) if check == "json" else answer,
    )


def addition(rng: Random) -> Exchange:
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    question = rng.choice(words.ADDITION).format(a=a, b=b)
    ones = a % 10 + b % 10
    carried = "+1" if ones > 9 else ""
    thought = f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}{carried}={(a + b) // 10}"
    return _plain("addition", (a, b), question, str(a + b), thought)


def subtraction(rng: Random) -> Exchange:
    b, a = sorted((rng.randint(0, LARGEST), rng.randint(0, LARGEST)))
    question = rng.choice(words.SUBTRACTION).format(a=a, b=b)
    borrowed = a % 10 < b % 10
    ones = f"{a % 10 + 10 * borrowed}-{b % 10}={(a - b) % 10}"
    tens = f"{a // 10}-{b // 10}{'-1' if borrowed else ''}={(a - b) // 10}"
    return _plain("subtraction", (a, b), question, str(a - b), f"{ones},{tens}")


def sort_numbers(rng: Random) -> Exchange:
    numbers = rng.sample(range(LARGEST + 1), rng.randint(2, 4))
    down = rng.random() < 0.3
    asked = words.SORT_NUMBERS_DOWN if down else words.SORT_NUMBERS
    question = rng.choice(asked).format(list=_joined(numbers))
    result = sorted(numbers, reverse=down)
    return _plain("sort_numbers", (down, sorted(numbers)), question, _joined(result))


def sort_words(rng: Random) -> Exchange:
    chosen = rng.sample(words.THINGS, rng.randint(3, 4))
    question = rng.choice(words.SORT_WORDS).format(list=_joined(chosen))
    result = sorted(chosen)
    return _plain("sort_words", result, question, _joined(result))


def count_items(rng: Random) -> Exchange:
    chosen = [rng.choice(words.THINGS) for _ in range(rng.randint(1, LONGEST_LIST))]
    question = rng.choice(words.COUNT_ITEMS).format(list=_joined(chosen))
    count = len(chosen)
    answer = "There is 1 item." if count == 1 else f"There are {count} items."
    thought = "".join(f"{place + 1}{one}" for place, one in enumerate(chosen))
    return _plain("count_items", _joined(chosen), question, answer, thought)


def count_letters(rng: Random) -> Exchange:
    letters = [rng.choice("abc") for _ in range(rng.randint(3, LONGEST_LIST))]
    wanted = rng.choice("abc")
    count = letters.count(wanted)
    question = rng.choice(words.COUNT_LETTERS).format(letter=wanted, list=" ".join(letters))
    times = "once" if count == 1 else f"{count} times"
    seen = 0
    steps = []
    for letter in letters:
        seen += letter == wanted
        steps.append(f"{letter}{seen}")
    item = (wanted, "".join(letters))
    return _plain("count_letters", item, question, f"{wanted} occurs {times}.", "".join(steps))


def next_date(rng: Random) -> Exchange:
    first = date(words.FIRST_YEAR, 1, 1)
    days = (date(words.LAST_YEAR, 12, 31) - first).days
    day = first + timedelta(days=rng.randint(0, days))
    if rng.random() < MONTH_ENDS:
        day = day.replace(day=1) - timedelta(days=1)
    result = day + timedelta(days=1)
    question = rng.choice(words.NEXT_DATE).format(date=day.isoformat())
    return _plain("next_date", day.isoformat(), question, result.isoformat())


def weekday(rng: Random) -> Exchange:
    start, days = rng.randrange(7), rng.randint(1, MOST_DAYS)
    result = words.WEEKDAYS[(start + days) % 7]
    question = rng.choice(words.WEEKDAY).format(
        day=words.WEEKDAYS[start], number=days, days="day" if days == 1 else "days"
    )
    passed = " ".join(words.WEEKDAYS[(start + one) % 7] for one in range(days % 7 + 1))
    thought = f"{days}={days - days % 7}+{days % 7}: {passed}"
    return _plain("weekday", (start, days), question, f"It is {result}.", thought)


def extraction(rng: Random) -> Exchange:
    name = rng.choice(words.NAMES) if rng.random() < 0.3 else made_up_name(rng)
    age, city = rng.randint(1, LARGEST), rng.choice(words.CITIES)
    with_city = rng.random() < 0.5
    facts: dict[str, Any] = {"name": name, "age": age}
    if with_city:
        facts["city"] = city
    sentence = rng.choice(words.FACTS_WITH_CITY if with_city else words.FACTS)
    asked = rng.choice(words.EXTRACT)
    question = asked.format(keys=_keys(facts), text=sentence.format(**facts))
    item = tuple(facts.values())
    return _plain("json", item, question, json.dumps(facts), check="json")


def _keys(facts: Mapping[str, Any]) -> str:
    *most, last = facts
    return f"{', '.join(most)} and {last}"


def tool_call(rng: Random) -> Exchange:
    """A request that a tool can fulfil, and which of the offered tools that is."""
    name = rng.choice(list(words.TOOLS))
    tool = words.TOOLS[name]
    value: Any = rng.randint(1, LARGEST) if tool.argument == "minutes" else rng.choice(words.CITIES)
    if tool.argument == "artist":
        value = made_up_name(rng)
    question = rng.choice(tool.requests).format(value=value)
    others = [other for other in words.TOOLS if other != name]
    offered = [name, *rng.sample(others, rng.randint(0, 1))]
    rng.shuffle(offered)
    function = {"name": name, "arguments": {tool.argument: value}}
    return Exchange(
        task="tool_call",
        item=f"{name}({value})",
        messages=({"role": "user", "content": question},),
        answer={
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        check="tool_call",
        expected=function,
        tools=tuple(offered),
    )


def tool_answer(rng: Random) -> Exchange:
    """What is said when a tool has returned its result."""
    call = tool_call(rng)
    function = call.expected
    tool = words.TOOLS[function["name"]]
    (value,) = function["arguments"].values()
    result = {key: draw_value(rng) for key, draw_value in tool.results.items()}
    answer = tool.answer.format(value=value, **result)
    content = json.dumps(result) if result else "done"
    return Exchange(
        task="tool_answer",
        item=f"{function['name']}({value}) {content}",
        messages=(*call.messages, call.answer, {"role": "tool", "content": content}),
        answer={"role": "assistant", "content": answer},
        check="exact",
        expected=answer,
        tools=call.tools,
    )


def small_talk(rng: Random) -> Exchange:
    questions, answer = rng.choice(words.SMALL_TALK)
    return _plain("small_talk", None, rng.choice(questions), answer)


def no_tool(rng: Random) -> Exchange:
    """A request for a tool that is not offered."""
    asked = tool_call(rng)
    missing = asked.expected["name"]
    return Exchange(
        task="no_tool",
        item=asked.item,
        messages=asked.messages,
        answer={"role": "assistant", "content": words.NO_TOOL},
        check="exact",
        expected=words.NO_TOOL,
        tools=tuple(one for one in asked.tools if one != missing),
    )


TASKS: dict[str, Callable[[Random], Exchange]] = {
    "addition": addition,
    "subtraction": subtraction,
    "sort_numbers": sort_numbers,
    "sort_words": sort_words,
    "count_items": count_items,
    "count_letters": count_letters,
    "next_date": next_date,
    "weekday": weekday,
    "json": extraction,
    "tool_call": tool_call,
    "tool_answer": tool_answer,
    "no_tool": no_tool,
    "small_talk": small_talk,
}
# Tasks without a fixed answer for everyone; small talk is learned by heart.
EVALUATED = tuple(task for task in TASKS if task != "small_talk")


def made_up_name(rng: Random) -> str:
    """A name of two or three syllables, so that names must be copied rather than known."""
    syllables = rng.choices(words.SYLLABLES, k=rng.randint(2, 3))
    return "".join(syllables).capitalize()


def _joined(things: list[Any]) -> str:
    return ", ".join(str(one) for one in things)
