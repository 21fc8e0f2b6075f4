"""``/openapi.json``, and ``/docs``: a page to read and try it, with nothing loaded from elsewhere."""

from __future__ import annotations

import msgspec
from quart import Blueprint, Response, redirect
from werkzeug.wrappers import Response as WerkzeugResponse

from pyserve.http.openapi import document
from pyserve.http.page import render_page
from pyserve.http.routes.common import text
from pyserve.http.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The documents family; made once, served from memory."""
    routes = Blueprint("documents", __name__)
    described = document(with_keys=bool(state.keys.keys))
    as_json = msgspec.json.encode(described)
    page = render_page(described, state.model)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return text(as_json, "application/json")

    @routes.get("/docs")
    async def docs() -> Response:
        response = text(page, "text/html; charset=utf-8")
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        )
        return response

    @routes.get("/")
    async def root() -> WerkzeugResponse:
        return redirect("/docs")

    return routes
