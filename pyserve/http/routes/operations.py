"""Health, readiness, version and metrics: what an operator's tools ask."""

from __future__ import annotations

import platform

from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Response

import pyserve
from pyserve.http.routes.common import json, text
from pyserve.http.shapes import Alive, Build, Health, Readiness, Version
from pyserve.http.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The operations family; open without a key."""
    routes = Blueprint("operations", __name__)

    @routes.get("/livez")
    async def livez() -> Response:
        return json(Alive(status="ok"))

    @routes.get("/readyz")
    async def readyz() -> Response:
        status = readiness(state)
        return json(Alive(status=status), *_unready(status))

    @routes.get("/health")
    async def health() -> Response:
        status = readiness(state)
        load = state.snapshot()
        body = Health(
            status=status,
            requests_running=load.requests_running,
            requests_waiting=load.requests_waiting,
            tokens_waiting=load.tokens_waiting,
            kv_cache_usage_ratio=load.kv_cache_usage_ratio,
            throttled=load.throttled,
        )
        return json(body, *_unready(status))

    @routes.get("/version")
    async def version() -> Response:
        build = Build(
            isa=state.build.isa,
            cuda=state.build.cuda,
            torch=state.build.torch,
            python=platform.python_version(),
        )
        return json(Version(version=pyserve.__version__, model=state.model, build=build))

    @routes.get("/metrics")
    async def metrics() -> Response:
        return text(state.metrics.render(), CONTENT_TYPE_LATEST)

    return routes


def readiness(state: ServerState) -> Readiness:
    """ "ok", "draining", or "unavailable" where steps have stopped making progress."""
    if state.engine.draining or state.shutdown.is_set():
        return "draining"
    return "ok" if state.engine.ready else "unavailable"


def _unready(status: str) -> tuple[int, dict[str, str]]:
    return (200, {}) if status == "ok" else (503, {"retry-after": "5"})
