"""Replies of a model that a server serves: OpenAI chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.error import URLError
from urllib.request import Request
from urllib.request import urlopen

from mkc.errors import ServerAnswerError
from mkc.runtime.tasks import Task
from mkc.runtime.text import Reply
from mkc.runtime.text import ToolCall

REFUSED = (400, 413, 422)  # statuses with which a server refuses one request
SHOWN_CHARACTERS = 300


class RequestRefusedError(Exception):
    """A server refused one request; the text is what it said."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model of a server.

    Attributes:
      url: up to and including the version, such as `http://localhost:8000/v1`.
      name: None takes the first model that the server lists.
      options: more keys of each request, such as `temperature`.
      timeout: seconds to wait for one answer.
    """

    url: str
    name: str | None = None
    api_key: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def named(self) -> str:
        """The model's name. Raises `ServerAnswerError`."""
        if self.name is not None:
            return self.name
        listed = self._ask("models", None)
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise self._unusable(listed) from error

    def reply(self, task: Task, name: str) -> Reply:
        """The answer to a task.

        Raises:
          RequestRefusedError: the server does not answer this one.
          ServerAnswerError: the server does not answer at all, or not as it should.
        """
        body: dict[str, Any] = {"model": name, "messages": list(task.messages), **self.options}
        if task.tools:
            body["tools"] = list(task.tools)
        answer = self._ask("chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            calls = [one["function"] for one in message.get("tool_calls") or ()]
            return Reply(
                reasoning=str(message.get("reasoning_content") or ""),
                content=str(message.get("content") or ""),
                tool_calls=tuple(
                    ToolCall(name=one["name"], arguments=one["arguments"], complete=True)
                    for one in calls
                ),
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise self._unusable(answer) from error

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = f"{self.url.rstrip('/')}/{path}"
        try:
            data = None if body is None else json.dumps(body).encode()
            with urlopen(Request(url, data, headers), timeout=self.timeout) as response:
                return json.loads(response.read())
        except HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:SHOWN_CHARACTERS]
            if error.code in REFUSED and body is not None:
                raise RequestRefusedError(f"status {error.code}: {said}") from error
            raise ServerAnswerError(
                url=url,
                problem=f"the server answered with status {error.code}: {said}",
                hint="Check the URL, the model's name and the key",
            ) from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerAnswerError(
                url=url,
                problem=f"there is no usable answer ({reason})",
                hint="Start the server, and give --url up to /v1",
            ) from error

    def _unusable(self, answer: object) -> ServerAnswerError:
        return ServerAnswerError(
            url=self.url,
            problem=f"the answer is {json.dumps(answer)[:SHOWN_CHARACTERS]}",
            hint="Use a server of this API",
        )
