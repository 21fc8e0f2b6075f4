from __future__ import annotations

from typing import Any

import pytest

from tests.http.serving import Serving, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}


async def error_of(server: Serving, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = await server.post(path, body)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": True}, "n"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ({"prompt": "x", "stop": [1]}, "stop[0]"),
        ({"prompt": "x", "min_tokens": 20, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "priority": "high"}, "priority"),
        ({"prompt": "x", "timeout_ms": 0}, "timeout_ms"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "x", "stop_token_ids": [0x110000]}, "stop_token_ids"),
        ({"prompt": [0x110000]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
    ],
)  # fmt: skip
async def test_a_wrong_value_is_a_400_that_names_its_field(body: Any, param: str) -> None:
    async with serving() as server:
        status, error = await error_of(server, "/v1/completions", body)
        assert (status, error["param"]) == (400, param), error
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("prompt_logprobs", 1),
        ("guided_json", {}),
        ("callback_url", "http://127.0.0.1/hook"),
        ("modalities", ["audio"]),
        ("store", True),
    ],
)
async def test_a_known_unsupported_field_is_refused_by_name(field: str, value: Any) -> None:
    async with serving() as server:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            status, error = await error_of(server, path, {**body, field: value})
            assert (status, error["param"]) == (400, field)
            assert error["code"] == "unsupported_parameter"


async def test_unsupported_fields_that_ask_for_nothing_are_accepted() -> None:
    quiet = {
        "response_format": {"type": "text"},
        "tools": [],
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "tool_choice": "none",
        "service_tier": "auto",
        "store": False,
    }
    async with serving() as server:
        answer = await server.post("/v1/completions", {**COMPLETION, **quiet})
        assert answer.status_code == 200, answer.text
        assert "x-pyserve-ignored-fields" not in answer.headers


async def test_unknown_fields_are_accepted_and_reported() -> None:
    async with serving() as server:
        body = {"messages": [{"role": "user", "content": "hi", "mood": 1}], "shiny": {"a": 1}}
        answer = await server.post("/v1/chat/completions", body)
        assert answer.status_code == 200
        assert answer.headers["x-pyserve-ignored-fields"] == "messages[0].mood, shiny"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
async def test_a_wrong_message_is_a_400_that_names_its_field(message: Any, param: str) -> None:
    async with serving() as server:
        status, error = await error_of(server, "/v1/chat/completions", {"messages": [message]})
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'"x"', b"[" * 5000]
)
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    async with serving() as server:
        headers = {"content-type": "application/json"}
        answer = await server.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_not_declared_json_is_a_415() -> None:
    async with serving() as server:
        answer = await server.client.post("/v1/completions", content=b'{"prompt": "x"}')
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"


async def test_a_prompt_beyond_the_context_is_context_length_exceeded() -> None:
    async with serving(engine={"context_length": 32}) as server:
        status, error = await error_of(server, "/v1/completions", {"prompt": "x" * 40})
        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_another_model_is_a_404() -> None:
    async with serving() as server:
        status, error = await error_of(server, "/v1/completions", {**COMPLETION, "model": "gpt-9"})
        assert (status, error["code"]) == (404, "model_not_found")
        assert (await server.get("/v1/models/gpt-9")).status_code == 404


async def test_unknown_paths_and_methods_have_the_error_body_too() -> None:
    async with serving() as server:
        for path in ("/nope", "/v1/files", "/v1/batches", "/v1/jobs/none"):
            answer = await server.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        answer = await server.get("/v1/chat/completions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert "POST" in answer.headers["allow"]
        answer = await server.client.delete("/health")
        assert answer.status_code == 405
        assert "GET" in answer.headers["allow"]


async def test_the_request_id_is_the_clients_own_where_it_is_sane() -> None:
    async with serving() as server:
        answer = await server.get("/livez", headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        answer = await server.get("/livez", headers={"x-request-id": "a b" * 100})
        assert answer.headers["x-request-id"].startswith("req-")
