"""The OpenAPI document is true: schemathesis makes requests from it and checks every answer against it."""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
import trio
from hypothesis import HealthCheck
from schemathesis import checks

from pyserve.http.openapi import OPERATIONS, document
from pyserve.http.page import render_page
from tests.http.serving import Serving, serving

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def test_every_reference_in_the_document_resolves() -> None:
    described = document(with_keys=True)
    names = set(described["components"]["schemas"])

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].rpartition("/")[2] in names
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(described)


def test_the_page_shows_every_operation_and_loads_nothing_from_elsewhere() -> None:
    page = render_page(document(with_keys=False), "a <model>").decode()
    assert page.count("<details>") == len(OPERATIONS)
    assert "a &lt;model&gt;" in page
    assert "://" not in page.replace("http://127.0.0.1", "")


async def test_every_answer_conforms_to_the_document() -> None:
    async with serving(engine={"context_length": 256}) as server:
        await trio.to_thread.run_sync(explore, server)


def explore(server: Serving) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith("/events"):
            continue  # ends with its job; no job of a made-up id exists

        @hypothesis.settings(
            max_examples=5,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def conforms(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # any other than the served one is a 404
            answer = case.call(timeout=30)
            case.validate_response(answer, checks=CHECKS)

        conforms()
