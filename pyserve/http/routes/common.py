"""What the Quart endpoints share: JSON by msgspec, and the request's own context."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from quart import Response, request

from pyserve.errors import InvalidRequest
from pyserve.http.context import SCOPE_KEY, RequestContext
from pyserve.http.validate import parse

T = TypeVar("T", bound=msgspec.Struct)


def context() -> RequestContext:
    """The context that the dispatcher made for the request in hand."""
    found: RequestContext = request.scope[SCOPE_KEY]  # type: ignore[literal-required]
    return found


def body_of(model: type[T]) -> T:
    """The body, checked; raises InvalidRequest naming the field. Ignored fields go to the response header."""
    current = context()
    parsed, ignored = parse(current.body, model)
    current.ignored(ignored)
    return parsed


def json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, content_type="application/json")


def text(body: bytes, content_type: str, status: int = 200) -> Response:
    """Any other answer."""
    return Response(body, status, content_type=content_type)


def query_integer(name: str, default: int, low: int, high: int) -> int:
    """A whole number in the query string; raises InvalidRequest as :func:`query_number` does."""
    raw: str = request.args.get(name, str(default))
    value = int(raw) if raw.isascii() and raw.isdigit() and len(raw) <= 9 else low - 1
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}", param=name)
    return value


def query_number(name: str, default: float, low: float, high: float) -> float:
    """A number in the query string; raises InvalidRequest naming it where it is none or out of range."""
    raw: Any = request.args.get(name)
    if raw is None:
        return default
    try:
        value = float(raw)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return value
