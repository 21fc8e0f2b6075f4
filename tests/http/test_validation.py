from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pyserve.http.schema import ChatRequest, CompletionRequest, EmbeddingRequest, JobRequest
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
        ({"prompt": "x", "logit_bias": {"01": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"prompt": "x", "priority": "high"}, "priority"),
        ({"prompt": "x", "timeout_ms": 0}, "timeout_ms"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "x", "stop_token_ids": [0x110000]}, "stop_token_ids"),
        ({"prompt": [0x110000]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 100}, "n"),
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
        ({"role": "user"}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
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


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_body_that_is_not_declared_json_is_a_415(headers: dict[str, str]) -> None:
    async with serving() as server:
        body = b'{"prompt": "x"}'
        answer = await server.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": ["ok", "\\udc00 x"]}', "prompt[1]"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "logit_bias": {"1": -Infinity}}', "logit_bias.1"),
        (b'{"prompt": "x", "max_tokens": 1e999}', "max_tokens"),
        (b'{"prompt": "x", "\\ud800": 1}', None),
        (b'{"prompt": "x", "a\\ud800": "\\ud800"}', "a?"),
        (b'{"prompt": "\\ud83d\\ude00", "temperature": }', None),
    ],
)  # fmt: skip
async def test_a_value_that_json_does_not_know_is_named(body: bytes, param: str | None) -> None:
    async with serving() as server:
        headers = {"content-type": "application/json"}
        for path in ("/v1/completions", "/submit", "/tokenize"):
            answer = await server.client.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_deep_nesting_is_a_400_whether_or_not_python_follows_it() -> None:
    body = b'{"x": ' + b"[" * 5000 + b"NaN" + b"]" * 5000 + b"}"
    async with serving() as server:
        headers = {"content-type": "application/json"}
        answer = await server.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert len(answer.json()["error"]["param"] or "") <= 256


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "max_completion_tokens": 3}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x", "messages": []}, "messages"),
        ("/v1/embeddings", {"input": "x", "stream": True}, "stream"),
        ("/v1/embeddings", {"input": "x", "max_tokens": 3}, "max_tokens"),
        ("/submit", {"prompt": "x", "stream": True}, "stream"),
        ("/v1/chat/completions", {**CHAT, "prompt": "x"}, "prompt"),
    ],
)
async def test_a_field_that_only_another_endpoint_has_is_refused(
    path: str, body: Any, param: str
) -> None:
    async with serving() as server:
        status, error = await error_of(server, path, body)
        assert (status, error["param"]) == (400, param)
        answer = await server.post(path, {**body, param: None})
        assert answer.status_code in (200, 202), answer.text


async def test_every_optional_field_accepts_null() -> None:
    async with serving() as server:
        for path, model, body in (
            ("/v1/completions", CompletionRequest, COMPLETION),
            ("/v1/chat/completions", ChatRequest, CHAT),
            ("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
            ("/submit", JobRequest, COMPLETION),
        ):
            nulls = {f.encode_name: None for f in msgspec.structs.fields(model)}
            for required in ("prompt", "messages"):
                nulls.pop(required, None)
            answer = await server.post(path, {**nulls, **body})
            assert answer.status_code in (200, 202), answer.text


async def test_template_arguments_cannot_replace_what_has_a_field_of_its_own() -> None:
    async with serving() as server:
        for name in ("messages", "add_generation_prompt", "self"):
            body = {**CHAT, "chat_template_kwargs": {name: 1}}
            status, error = await error_of(server, "/v1/chat/completions", body)
            assert (status, error["param"]) == (400, "chat_template_kwargs")


async def test_an_embedding_may_fill_the_context() -> None:
    async with serving(engine={"context_length": 32}) as server:
        assert (await server.post("/v1/embeddings", {"input": [65] * 32})).status_code == 200
        status, error = await error_of(server, "/v1/embeddings", {"input": [65] * 33})
        assert (status, error["param"]) == (400, "input")
        assert error["code"] == "context_length_exceeded"


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
