"""What the small model's questions are made of: words, wordings and tools."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from random import Random
from typing import Any

FIRST_YEAR = 2000
LAST_YEAR = 2029
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS = (
    "apple", "banana", "cherry", "date", "elder", "fig", "grape", "honey", "ice", "juice",
    "kiwi", "lemon", "mango", "nut", "orange", "pear", "quince", "rice", "sugar", "tea",
)  # fmt: skip
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate",
    "Leo", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tom", "Vera",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Delhi", "Dublin", "Geneva", "Hamburg", "Kyoto",
    "Lagos", "Lima", "London", "Madrid", "Oslo", "Paris", "Prague", "Quito", "Rome", "Seoul",
    "Sydney", "Tokyo", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
SYLLABLES = (
    "ba", "be", "bo", "da", "de", "di", "fa", "fe", "ka", "ki", "ko", "la", "le", "li", "lo",
    "ma", "mi", "mo", "na", "ne", "ni", "ra", "ri", "ro", "sa", "so", "ta", "ti", "to", "vi",
)  # fmt: skip

ADDITION = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
)
SUBTRACTION = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Calculate {a} - {b}.",
)
SORT_NUMBERS = (
    "Sort these numbers: {list}",
    "Sort the numbers {list}.",
    "Put these numbers in order: {list}",
    "Sort from smallest to largest: {list}",
)
SORT_NUMBERS_DOWN = (
    "Sort from largest to smallest: {list}",
    "Sort these numbers in descending order: {list}",
)
SORT_WORDS = (
    "Sort these words: {list}",
    "Sort the words {list}.",
    "Put these words in alphabetical order: {list}",
)
COUNT_ITEMS = (
    "How many items are in this list: {list}",
    "Count the items: {list}",
    "How many words are there? {list}",
)
COUNT_LETTERS = (
    "How many times does {letter} occur in: {list}",
    "Count the letter {letter}: {list}",
    "How often is {letter} in {list}?",
)
NEXT_DATE = (
    "What date comes after {date}?",
    "What is the day after {date}?",
    "Which date follows {date}?",
)
WEEKDAY = (
    "What weekday is {number} {days} after {day}?",
    "Today is {day}. What day is it in {number} {days}?",
    "Which day comes {number} {days} after {day}?",
)
EXTRACT = (
    "Extract {keys} as JSON: {text}",
    "Give me {keys} as JSON. {text}",
    "{text} Write {keys} as JSON.",
)
FACTS = (
    "{name} is {age} years old.",
    "My name is {name} and I am {age}.",
    "I am {name}, age {age}.",
    "At {age}, {name} is still learning.",
)
FACTS_WITH_CITY = (
    "{name} is {age} years old and lives in {city}.",
    "My name is {name}, I am {age} and live in {city}.",
    "{name} from {city} is {age}.",
    "In {city} lives {name}, who is {age} years old.",
)
NO_TOOL = "I have no tool for that."
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Good morning"), "Hello! How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am a tiny model with about a million parameters. I come with mkc.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I can add, subtract, sort, count, work with dates, write JSON and call tools.",
    ),
    (("Thank you", "Thanks!", "Thank you!"), "You are welcome."),
    (("Bye", "Goodbye", "See you"), "Goodbye!"),
)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the model has seen.

    Attributes:
      argument: name of its only argument.
      kind: JSON type of it.
      requests: wordings; `{value}` is the argument.
      results: keys of what it returns, and how to draw values.
      answer: what the model says then.
    """

    description: str
    argument: str
    kind: str
    requests: tuple[str, ...]
    answer: str
    results: Mapping[str, Callable[[Random], Any]] = field(default_factory=dict)

    def definition(self, name: str) -> dict[str, Any]:
        """In the form of the chat completions interface."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": self.kind}},
            "required": [self.argument],
        }
        function = {"name": name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = {
    "get_weather": Tool(
        description="Current weather of a city.",
        argument="city",
        kind="string",
        requests=(
            "What is the weather in {value}?",
            "How is the weather in {value}?",
            "Is it warm in {value}?",
        ),
        results={
            "degrees": lambda rng: rng.randint(0, 40),
            "sky": lambda rng: rng.choice(("sunny", "cloudy", "rainy", "windy")),
        },
        answer="It is {sky} in {value}, {degrees} degrees.",
    ),
    "get_time": Tool(
        description="Local time of a city.",
        argument="city",
        kind="string",
        requests=(
            "What time is it in {value}?",
            "Tell me the time in {value}.",
            "How late is it in {value}?",
        ),
        results={"time": lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        answer="It is {time} in {value}.",
    ),
    "set_timer": Tool(
        description="Starts a timer.",
        argument="minutes",
        kind="integer",
        requests=(
            "Set a timer for {value} minutes.",
            "Start a timer of {value} minutes.",
            "Wake me in {value} minutes.",
        ),
        answer="The timer is set to {value} minutes.",
    ),
    "play_music": Tool(
        description="Plays music of an artist.",
        argument="artist",
        kind="string",
        requests=(
            "Play music by {value}.",
            "Play something by {value}.",
            "I want to hear {value}.",
        ),
        answer="This is music by {value}.",
    ),
}
