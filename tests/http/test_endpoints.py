from __future__ import annotations

import pytest

from tests.http.serving import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_chat_answers_whole() -> None:
    async with serving() as server:
        answer = await server.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "<USER>HI<ASSISTANT>"


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/livez",
        "/readyz",
        "/version",
        "/v1/models",
        "/v1/models/fake-model",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/v1/jobs",
    ],
)
async def test_reading_endpoints_answer(path: str) -> None:
    async with serving() as server:
        answer = await server.get(path)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"].startswith("req-")
