"""What a server says of itself: health, version, models, figures."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import ServedModelError
from serve.context import JSON
from serve.context import Server
from serve.engine import LOADING_RETRY
from serve.engine import State
from serve.schemas.base import Answer
from serve.schemas.tokens import Health
from serve.schemas.tokens import Load
from serve.schemas.tokens import Model
from serve.schemas.tokens import Models
from serve.schemas.tokens import Version

DISTRIBUTION = "mkc-tpu"
UNAVAILABLE = 503
KERNELS = {  # what runs, by backend
    "reference": "no kernel: the graph, evaluated by XLA",
    "interpret": "one kernel, interpreted",
    "tpu": "one kernel",
}


async def health(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /health` and `GET /ping`: 200 when requests are taken."""
    engine = server.engine
    if engine.state is State.READY:
        return _json(Health(status="ok"))
    answer = Health(status=engine.state.value)
    if engine.state is State.LOADING:
        answer.stage = engine.stage
        answer.seconds = round(engine.loading_seconds, 1)
    return _json(answer, status=UNAVAILABLE, headers={"Retry-After": str(LOADING_RETRY)})


async def served_version(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /version`."""
    answer = Version(version=version(DISTRIBUTION), state=server.engine.state.value)
    served = server.engine.model
    if served is not None:
        answer.backend = served.backend.name
        answer.kernel = KERNELS[served.backend.name]
        answer.scheme = served.scheme
        answer.fingerprint = served.fingerprint
        answer.target = served.target
        answer.description = served.description
        answer.hbm_bytes, answer.vmem_bytes = served.hbm_bytes, served.vmem_bytes
        answer.pictures = list(served.pictures.names) if served.pictures is not None else []
    return _json(answer)


async def models(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /v1/models`."""
    served = server.engine.ready_model()
    names = (served.name, *served.aliases)
    return _json(Models(object="list", data=[_model(server, name) for name in names]))


async def model(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /v1/models/{name}`."""
    served = server.engine.ready_model()
    name = http.path_params["name"]
    if name not in (served.name, *served.aliases):
        raise ServedModelError(name=name, served=served.name)
    return _json(_model(server, name))


async def metrics(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /metrics`."""
    engine = server.engine
    engine.metrics.load(running=engine.running, waiting=engine.waiting, usage=engine.usage)
    return Response(engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def load(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /load`."""
    engine = server.engine
    served = engine.model
    floor = served.step_floor_us if served is not None else None
    return _json(
        Load(
            state=engine.state.value,
            running=engine.running,
            waiting=engine.waiting,
            slots=served.backend.batch if served is not None else 0,
            queue_size=engine.queue_size,
            kv_cache_usage=engine.usage,
            rounds=engine.metrics.rounds,
            round_ms=1e3 * engine.metrics.round_seconds,
            predicted_round_ms=None if floor is None else floor / 1e3,
            acceptance=list(engine.metrics.acceptance),
        )
    )


def _model(server: Server, name: str) -> Model:
    served = server.engine.ready_model()
    return Model(
        id=name,
        object="model",
        created=server.created,
        owned_by="mkc",
        root=served.name,
        max_model_len=served.backend.context,
    )


def _json(answer: Answer, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.json_bytes(), status_code=status, headers=headers, media_type=JSON)
