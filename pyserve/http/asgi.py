"""The outermost ASGI application: guards around everything, then the right room.

Every request passes here once: it gets its id, shows its key, has its body read within limits of size and
time, is answered by a raw endpoint (inference) or the Quart app (the rest), and leaves one access line. No
error of one request leaves it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager

import structlog
import trio

from pyserve.errors import RequestError, Unavailable
from pyserve.http.config import HttpConfig
from pyserve.http.context import (
    SCOPE_KEY,
    ClientGone,
    Message,
    Receive,
    RequestContext,
    Responder,
    Scope,
    Send,
)
from pyserve.http.errors import (
    BodyTooLarge,
    InternalError,
    NotJson,
    RequestTimeout,
)
from pyserve.http.state import ServerState

Endpoint = Callable[[RequestContext, Receive, Responder], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset(
    ("/", "/health", "/livez", "/readyz", "/metrics", "/version", "/docs", "/openapi.json")
)
_log = structlog.get_logger("pyserve.http")


class Dispatcher:
    """Raw endpoints by path (POST only) beside an inner ASGI app for everything else."""

    def __init__(
        self,
        state: ServerState,
        config: HttpConfig,
        inner: AsgiApp,
        endpoints: Mapping[str, Endpoint],
    ) -> None:
        self._state = state
        self._config = config
        self._inner = inner
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection scope."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        responder = Responder(
            _bounded(scope, send, self._config), context, self._config.write_timeout_s
        )
        started_s = time.perf_counter()
        with _bound(context):
            try:
                await self._answer(scope, context, receive, responder)
            except ClientGone:
                pass
            except RequestError as error:
                context.log["error"] = error.code
                await self._fail(responder, error)
            except Exception as error:
                _log.exception("request failed", path=context.path, error=repr(error))
                await self._fail(responder, InternalError("internal error; see the server's log"))
            except (
                BaseException
            ):  # Cancelled: the server ends at once, but allows a moment for this
                with trio.CancelScope(shield=True):
                    await self._fail(responder, Unavailable("the server has stopped"))
                raise
            finally:
                self._access_line(context, responder, time.perf_counter() - started_s)

    async def _answer(
        self, scope: Scope, context: RequestContext, receive: Receive, responder: Responder
    ) -> None:
        if context.path not in OPEN_PATHS:
            context.key = self._state.keys.authenticate(context.header(b"authorization"))
        context.body = await self._read_body(context, receive)
        context.arrival_s = self._state.engine.now()
        endpoint = self._endpoints.get(context.path)
        if endpoint is not None and context.method == "POST":
            await endpoint(context, receive, responder)
        else:
            scope[SCOPE_KEY] = context
            await self._inner(scope, _replay(context.body, receive), responder.send)

    async def _read_body(self, context: RequestContext, receive: Receive) -> bytes:
        limit = self._config.body_limit
        declared = context.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the body may be at most {limit} bytes")
        chunks: list[bytes] = []
        size = 0
        with trio.move_on_after(self._config.body_timeout_s) as scope:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise BodyTooLarge(f"the body may be at most {limit} bytes")
                if not message.get("more_body", False):
                    break
        if scope.cancelled_caught:
            raise RequestTimeout(
                f"the body did not arrive within {self._config.body_timeout_s:g} s"
            )
        body = b"".join(chunks)
        if body and context.method in ("POST", "PUT", "PATCH"):
            _require_json(context)
        return body

    async def _fail(self, responder: Responder, error: RequestError) -> None:
        try:
            await responder.fail(error)
        except Exception as failure:
            _log.debug("error not delivered", error=repr(failure))

    def _access_line(self, context: RequestContext, responder: Responder, seconds: float) -> None:
        status = responder.status or 499  # nothing was sent: the client had gone
        if not responder.finished and context.log.get("finish_reason") is None:
            context.log.setdefault("finish_reason", "abort")
        self._state.metrics.http_request(context.method, status)
        _log.info(
            "access",
            method=context.method,
            path=context.path,
            status=status,
            duration_ms=round(seconds * 1e3, 2),
            key=context.key.name,
            **context.log,
        )


def _require_json(context: RequestContext) -> None:
    if context.header(b"content-encoding").strip().lower() not in ("", "identity"):
        raise NotJson("a body with a content-encoding is not supported")
    kind = context.header(b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise NotJson("the body must be application/json")


def _bound(context: RequestContext) -> AbstractContextManager[object]:
    return structlog.contextvars.bound_contextvars(request_id=context.request_id)


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI ``receive`` that gives the body once, then what the connection says."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _bounded(scope: Scope, send: Send, config: HttpConfig) -> Send:
    """HTTP/2 writes wait for the client's window, which the socket's own time-out does not see."""
    if scope["http_version"] != "2":
        return send

    async def bounded(message: Message) -> None:
        with trio.move_on_after(config.write_timeout_s) as cancel:
            await send(message)
        if cancel.cancelled_caught:
            raise ClientGone

    return bounded
