"""Errors that a request can meet, from admission to its last token.

Each carries what a client needs to know and nothing about HTTP but the number that fits it: the HTTP
layer turns any :class:`RequestError` into OpenAI's error body, the job runner stores the same fields.
"""

from __future__ import annotations


class PyserveError(Exception):
    """Base of everything that pyserve raises on purpose."""


class RequestError(PyserveError):
    """A request that cannot be served, or can no longer be.

    ``status`` is the HTTP status, ``code`` and ``type`` OpenAI's words for it, ``param`` the field of
    the body at fault (None where there is none), ``retry_after_s`` when a retry may succeed (seconds).
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """A value of the wrong type or out of range; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the model's context."""

    code = "context_length_exceeded"


class QueueFull(RequestError):
    """The waiting line is at its limit (requests or tokens)."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimited(RequestError):
    """This API key is over its own token rate or concurrency."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class DeadlineExceeded(RequestError):
    """``timeout_ms`` cannot be met any more, or ran out."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Unavailable(RequestError):
    """Draining, or the model is not ready."""

    status = 503
    code = "unavailable"


class Cancelled(RequestError):
    """Cancelled by its owner (a disconnect, DELETE on a job, or shutdown)."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class StepFailed(RequestError):
    """The forward pass raised for this request, alone; the log has the details."""

    status = 500
    code = "step_failed"


class ModelError(PyserveError):
    """A checkpoint that cannot be read or is not supported; the message says what to do."""
