"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import RequestFieldError
from mkc.runtime.text import Prompt
from serve.building import chat_prompt
from serve.building import check_model
from serve.building import id_prompt
from serve.building import text_prompt
from serve.context import Server
from serve.model import ServedModel
from serve.outcome import token_text
from serve.schemas.tokens import DetokenizeRequest
from serve.schemas.tokens import Text
from serve.schemas.tokens import TokenizeRequest
from serve.schemas.tokens import Tokens


async def tokenize(server: Server, http: HttpRequest) -> Response:
    """Answers `POST /tokenize`."""
    asked = await server.read(http, TokenizeRequest)
    check_model(asked.model, asked.body.model)
    prompt = await run_in_threadpool(_prompt, asked.body, asked.model)
    answer = Tokens(
        tokens=list(prompt.ids), count=len(prompt.ids), max_model_len=asked.model.backend.context
    )
    if asked.body.return_token_strs:
        answer.token_strs = [token_text(asked.model.tokenizer, one)[0] for one in prompt.ids]
    return asked.answer(answer)


async def detokenize(server: Server, http: HttpRequest) -> Response:
    """Answers `POST /detokenize`."""
    asked = await server.read(http, DetokenizeRequest)
    check_model(asked.model, asked.body.model)
    prompt = id_prompt(asked.model, asked.body.tokens, "tokens")
    return asked.answer(Text(prompt=asked.model.tokenizer.decode(prompt.ids)))


def _prompt(body: TokenizeRequest, model: ServedModel) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestFieldError(
            field="prompt",
            problem="and messages are both there" if body.prompt is not None else "is missing",
            expected="either a prompt or messages",
        )
    if body.prompt is not None:
        return text_prompt(
            model,
            body.prompt,
            special=bool(body.allow_special_tokens),
            prefix=body.add_special_tokens is not False,
        )
    assert body.messages is not None
    return chat_prompt(
        model,
        body.messages,
        tools=body.tools or (),
        options=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
