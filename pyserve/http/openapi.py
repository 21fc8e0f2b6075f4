"""The OpenAPI 3.1 document, made from the structs that check requests and shape answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import pyserve
from pyserve.http import schema, shapes
from pyserve.http.errors import ErrorBody


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. ``answer`` None means plain text; ``errors`` are the statuses beside success."""

    method: str
    path: str
    tag: str
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    stream: bool = False
    is_open: bool = False
    headers: dict[str, Any] = field(default_factory=dict)


def _parameter(name: str, place: str, kind: dict[str, Any], text: str) -> dict[str, Any]:
    needed = place == "path"
    return {"name": name, "in": place, "required": needed, "schema": kind, "description": text}


_JOB_ID = _parameter("job_id", "path", {"type": "string"}, "The job's id.")
_IDEMPOTENCY = _parameter(
    "Idempotency-Key",
    "header",
    {"type": "string", "maxLength": 255, "pattern": "^[!-~]*$"},
    "The same key with the same body is done once; with another body it is a 409.",
)
_WAIT = _parameter(
    "wait",
    "query",
    {"type": "number", "minimum": 0, "maximum": 300},
    "Seconds to wait for the job's end.",
)
_LAST_EVENT = _parameter(
    "Last-Event-ID", "header", {"type": "integer", "minimum": 0}, "Resume behind this event."
)
_PAGE = (
    _parameter("status", "query", {"enum": list(shapes.JobState.__args__)}, "Only these."),  # type: ignore[attr-defined]
    _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}, "Page size."),
    _parameter("after", "query", {"type": "string"}, "The last id of the page before."),
)
_WORK = (400, 401, 404, 408, 409, 413, 415, 429, 500, 503, 504)
_READ = (400, 401, 404)

OPERATIONS: Sequence[Operation] = (
    Operation(
        "post",
        "/v1/completions",
        "inference",
        "Complete a prompt",
        shapes.Completion,
        schema.CompletionRequest,
        errors=_WORK,
        parameters=(_IDEMPOTENCY,),
        stream=True,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "inference",
        "Answer a conversation",
        shapes.ChatCompletion,
        schema.ChatRequest,
        errors=_WORK,
        parameters=(_IDEMPOTENCY,),
        stream=True,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "inference",
        "Embed texts",
        shapes.EmbeddingList,
        schema.EmbeddingRequest,
        errors=_WORK,
        parameters=(_IDEMPOTENCY,),
    ),
    Operation("get", "/v1/models", "models", "List models", shapes.ModelList, errors=(400, 401)),
    Operation(
        "get",
        "/v1/models/{model}",
        "models",
        "Describe a model",
        shapes.ModelCard,
        errors=_READ,
        parameters=(_parameter("model", "path", {"type": "string"}, "The model's id."),),
    ),
    Operation(
        "post",
        "/tokenize",
        "tokens",
        "Text or messages to token ids",
        shapes.Tokenized,
        schema.TokenizeRequest,
        errors=(400, 401, 404, 408, 413, 415),
    ),
    Operation(
        "post",
        "/detokenize",
        "tokens",
        "Token ids to text",
        shapes.Detokenized,
        schema.DetokenizeRequest,
        errors=(400, 401, 404, 408, 413, 415),
    ),
    Operation(
        "post",
        "/submit",
        "jobs",
        "Submit a job, collect it later",
        shapes.JobView,
        schema.JobRequest,
        202,
        _WORK,
        (_IDEMPOTENCY,),
    ),
    Operation(
        "post",
        "/v1/jobs",
        "jobs",
        "Submit a job, collect it later",
        shapes.JobView,
        schema.JobRequest,
        202,
        _WORK,
        (_IDEMPOTENCY,),
    ),
    Operation(
        "get",
        "/v1/jobs",
        "jobs",
        "List jobs, newest first",
        shapes.JobList,
        errors=(400, 401),
        parameters=_PAGE,
    ),
    Operation(
        "get",
        "/v1/jobs/{job_id}",
        "jobs",
        "A job's state and result; a long poll with wait",
        shapes.JobView,
        errors=_READ,
        parameters=(_JOB_ID, _WAIT),
    ),
    Operation(
        "delete",
        "/v1/jobs/{job_id}",
        "jobs",
        "Cancel a job",
        shapes.JobView,
        errors=_READ,
        parameters=(_JOB_ID,),
    ),
    Operation(
        "get",
        "/v1/jobs/{job_id}/events",
        "jobs",
        "A job's events as they happen, resumable",
        None,
        errors=_READ,
        parameters=(_JOB_ID, _LAST_EVENT),
        stream=True,
    ),
    Operation(
        "get",
        "/health",
        "operations",
        "Load and state",
        shapes.Health,
        errors=(503,),
        is_open=True,
    ),
    Operation("get", "/livez", "operations", "The loop answers", shapes.Alive, is_open=True),
    Operation(
        "get",
        "/readyz",
        "operations",
        "Loaded, not draining, making progress",
        shapes.Alive,
        errors=(503,),
        is_open=True,
    ),
    Operation("get", "/version", "operations", "Version and build", shapes.Version, is_open=True),
    Operation("get", "/metrics", "operations", "Prometheus metrics", None, is_open=True),
)

_ERRORS = {
    400: "A value of the wrong type or out of range; `param` names the field",
    401: "No API key, or an unknown one",
    404: "Unknown path, model or job",
    408: "The body did not arrive in time",
    409: "Idempotency-Key used with another body",
    413: "Body too large",
    415: "Body not JSON",
    429: "Queue full or over rate; see Retry-After",
    500: "Internal error",
    503: "Draining or not ready; see Retry-After",
    504: "Deadline exceeded",
}


def document(*, with_keys: bool) -> dict[str, Any]:
    """The whole document as JSON-ready values; ``with_keys``: the server asks for API keys."""
    types: list[type[msgspec.Struct]] = [ErrorBody]
    for operation in OPERATIONS:
        types += [kind for kind in (operation.answer, operation.body) if kind is not None]
    unique = list(dict.fromkeys(types))
    refs, components = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(unique, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _describe(operation, by_type, with_keys)
        paths.setdefault(operation.path, {})[operation.method] = described
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "pyserve",
            "version": pyserve.__version__,
            "description": "An LLM inference server with OpenAI's endpoints, and jobs.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return result


def _describe(
    operation: Operation, refs: dict[type[msgspec.Struct], dict[str, Any]], with_keys: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": refs[operation.answer]}
    if operation.stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if not content:
        content["text/plain"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": refs[ErrorBody]}}
    answers: dict[str, Any] = {
        str(operation.status): {"description": "Success", "content": content}
    }
    for status in operation.errors:
        unready = status == 503 and operation.answer in (shapes.Health, shapes.Alive)
        answers[str(status)] = {
            "description": "Not ready" if unready else _ERRORS[status],
            "content": content if unready else error,
        }
    name = operation.path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    described: dict[str, Any] = {
        "operationId": f"{operation.method}_{name}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": answers,
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[operation.body]}},
        }
    if with_keys and not operation.is_open:
        described["security"] = [{"key": []}]
    return described
