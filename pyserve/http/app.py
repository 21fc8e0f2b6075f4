"""The whole wire in one place: raw inference endpoints beside the Quart app of everything else."""

from __future__ import annotations

import structlog
import trio
from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from pyserve.errors import InvalidRequest, RequestError
from pyserve.http.asgi import AsgiApp, Dispatcher
from pyserve.http.config import HttpConfig
from pyserve.http.errors import InternalError, MethodNotAllowed, NotFound, error_body, error_headers
from pyserve.http.idempotency import Idempotency
from pyserve.http.inference import Inference
from pyserve.http.limits import KeyLimits
from pyserve.http.routes import documents, jobs, models, operations, tokens
from pyserve.http.routes.common import context
from pyserve.http.state import ServerState
from pyserve.jobs.memory import MemoryJobStore
from pyserve.jobs.runner import JobRunner
from pyserve.telemetry.stores import store_samples

_log = structlog.get_logger("pyserve.http")


async def build_app(state: ServerState, config: HttpConfig, nursery: trio.Nursery) -> Dispatcher:
    """The ASGI application; its jobs run in ``nursery``."""
    limits = KeyLimits(state.engine.now)
    idempotency = Idempotency(
        state.engine.now,
        entries=config.idempotency_entries,
        max_bytes=config.idempotency_bytes,
        ttl_s=config.idempotency_ttl_s,
    )
    store = MemoryJobStore(
        max_jobs=config.max_jobs, max_bytes=config.job_bytes, ttl_s=config.job_ttl_s
    )
    state.metrics.add_source(lambda: store_samples(store.statistics(), idempotency.statistics()))
    executor = jobs.GenerationExecutor(state, limits)
    runner = JobRunner(store, executor, nursery)
    quart = build_quart(state, config)
    family = jobs.JobRoutes(state, runner, idempotency)
    quart.register_blueprint(family.blueprint())
    inference = Inference(state, config, limits, idempotency)
    endpoints = {**inference.endpoints(), **family.endpoints()}
    for path in endpoints:  # so that Quart knows them: 405 and Allow for other methods
        quart.add_url_rule(path, f"raw:{path}", _raw_only, methods=["POST"])
    inner: AsgiApp = quart  # type: ignore[assignment]
    return Dispatcher(state, config, inner, endpoints)


def build_quart(state: ServerState, config: HttpConfig) -> QuartTrio:
    """The ordinary endpoints; every error, Quart's own too, has OpenAI's body."""
    app = QuartTrio("pyserve", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.body_limit
    app.config["RESPONSE_TIMEOUT"] = None  # bounded by the write time-out instead
    app.config["BODY_TIMEOUT"] = None  # the dispatcher has read the body already
    app.register_blueprint(models.blueprint(state))
    app.register_blueprint(operations.blueprint(state))
    app.register_blueprint(tokens.blueprint(state))
    app.register_blueprint(documents.blueprint(state))
    app.register_error_handler(RequestError, _request_error)
    app.register_error_handler(HTTPException, _http_exception)
    app.register_error_handler(Exception, _unexpected)
    return app


async def _raw_only() -> Response:
    raise RuntimeError("the dispatcher answers this path")


async def _request_error(error: RequestError) -> Response:
    context().log["error"] = error.code
    headers = [
        (name.decode("ascii"), value.decode("latin-1")) for name, value in error_headers(error)
    ]
    response = Response(error_body(error), error.status, content_type="application/json")
    response.headers.extend(headers)
    return response


async def _http_exception(error: HTTPException) -> Response:
    if isinstance(error, WerkzeugMethodNotAllowed):
        return await _request_error(MethodNotAllowed(", ".join(sorted(error.valid_methods or ()))))
    if error.code == 404:
        return await _request_error(NotFound(f"no such path: {context().path}"))
    if error.code is not None and 300 <= error.code < 400:
        return await _request_error(NotFound(f"no such path: {context().path}"))
    if error.code is not None and error.code < 500:
        return await _request_error(InvalidRequest(error.description or error.name))
    return await _request_error(InternalError(error.name))


async def _unexpected(error: Exception) -> Response:
    _log.error("request failed", path=context().path, error=repr(error), exc_info=error)
    return await _request_error(InternalError("internal error; see the server's log"))
