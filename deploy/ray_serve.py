"""Replicas of a model behind Ray Serve, each on one host.

    serve run deploy.ray_serve:app weights=/shared/checkpoint replicas=2
    curl localhost:8000 -d '{"messages": [{"role": "user", "content": "What is 12 + 7?"}]}'

A replica holds a generator, and answers one request at a time; Ray gives it the next one. With
`backend=tpu tpus=4` it takes all chips of a host. A model over several hosts is started with
`--distributed` by another launcher (docs/distributed.md), not by Ray.
"""

from __future__ import annotations

from asyncio import Lock
from asyncio import to_thread
from pathlib import Path
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import Session
from mkc.cli.generation import open_session
from mkc.cli.generation import sampling_of
from mkc.cli.run import chat_request
from mkc.errors import MkcError
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import StopConditions

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
BAD_REQUEST = 400


class Replica:
    """One model on one host."""

    def __init__(self, choice: ModelChoice) -> None:
        """
        Args:
          choice: as `mkc run` takes it.
        """
        self._session: Session = open_session(choice, quiet=False)
        self._turn = Lock()  # a generator is not for use by several threads

    async def __call__(self, request: Request) -> JSONResponse:
        """Answers `{"messages": [...], "max_tokens": 100, "temperature": 0.8}`."""
        try:
            body = await request.json()
            async with self._turn:
                return JSONResponse(await to_thread(self._answer, body))
        except MkcError as error:
            return JSONResponse({"error": error.report()}, status_code=BAD_REQUEST)
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"error": f"not a request: {error}"}, status_code=BAD_REQUEST)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        sampling = sampling_of(session.sampling, **{name: body.get(name) for name in SAMPLING})
        asked = ChatRequest(messages=body["messages"])
        request = chat_request(session, asked, sampling, StopConditions(), body.get("max_tokens"))
        deltas = list(session.stream(request))
        finish = deltas[-1].finish
        assert finish is not None
        if finish.error is not None:
            raise finish.error
        events = [event for one in deltas for event in one.events]
        return {
            "text": "".join(one.text for one in deltas),
            "reasoning": "".join(one.text for one in events if isinstance(one, ReasoningDelta)),
            "finish_reason": finish.reason.value,
            "prompt_tokens": finish.statistics.prompt_tokens,
            "output_tokens": finish.statistics.output_tokens,
            "backend": session.description,
        }


def app(arguments: dict[str, str]) -> serve.Application:
    """The application; `serve run` passes `key=value` arguments.

    Args:
      arguments: weights, model, revision, backend, target, packed, context as the options of
        `mkc run`; replicas; cpus and tpus of a host for each of them.
    """
    context = arguments.get("context")
    choice = ModelChoice(
        model=arguments.get("model"),
        weights=arguments.get("weights"),
        revision=arguments.get("revision"),
        packed=Path(arguments["packed"]) if "packed" in arguments else None,
        backend=BackendChoice(arguments.get("backend", BackendChoice.REFERENCE.value)),
        target=arguments.get("target", "tpu7x"),
        tp=None,
        context=int(context) if context is not None else None,
    )
    resources: dict[str, Any] = {"num_cpus": int(arguments.get("cpus", "2"))}
    if "tpus" in arguments:
        resources["resources"] = {"TPU": int(arguments["tpus"])}
    deployment = serve.deployment(
        num_replicas=int(arguments.get("replicas", "1")),
        max_ongoing_requests=1,
        max_replicas_per_node=1,
        ray_actor_options=resources,
    )(Replica)
    return deployment.bind(choice)
