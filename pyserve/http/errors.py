"""OpenAI's error body, from every kind of error that can reach the wire.

One shape, whatever went wrong: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import math

import msgspec

from pyserve.errors import InvalidRequest, RequestError


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong. ``param`` names the field of the body at fault, ``code`` is for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Unauthorized(RequestError):
    """No API key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(RequestError):
    """No such path, model or job."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """The body names a model that is not served here."""

    code = "model_not_found"


class MethodNotAllowed(RequestError):
    """The path exists, this method on it does not; ``allow`` lists those that do."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, allow: str) -> None:
        super().__init__(f"method not allowed here; use {allow}")
        self.allow = allow


class RequestTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class Conflict(RequestError):
    """An ``Idempotency-Key`` that was used with another body."""

    status = 409
    type = "invalid_request_error"
    code = "idempotency_conflict"


class BodyTooLarge(RequestError):
    """The body is larger than ``body_limit``."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class NotJson(RequestError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Unsupported(InvalidRequest):
    """A field that is known and does nothing here: refused, never ignored."""

    code = "unsupported_parameter"


class InternalError(RequestError):
    """A fault of the server's own; the log has the details under the same request id."""


def error_body(error: RequestError) -> bytes:
    """OpenAI's error body as JSON."""
    param = None if error.param is None else _as_unicode(error.param)
    detail = ErrorDetail(_as_unicode(error.message), error.type, param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def _as_unicode(text: str) -> str:
    """Without unpaired surrogates, which what a client sent may hold and JSON cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """This error's own headers: ``Retry-After`` in whole seconds, ``Allow``, ``WWW-Authenticate``."""
    headers: list[tuple[bytes, bytes]] = []
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in (429, 503):
        retry_after_s = 1.0
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(min(retry_after_s, 86_400.0)))))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("ascii")))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_event(error: RequestError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + error_body(error) + b"\n\n"
