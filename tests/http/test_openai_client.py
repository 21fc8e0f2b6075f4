"""The official client, synchronous and asynchronous, against a server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import openai
import pytest
import trio

from pyserve.errors import StepFailed
from tests.http.serving import Serving, serving

T = TypeVar("T")
MESSAGES: Any = [{"role": "user", "content": "hi"}]
ANSWER = "<USER>HI<ASSISTANT>"


async def in_thread(server: Serving, use: Callable[[openai.OpenAI], T]) -> T:
    def run() -> T:
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            return use(client)

    return await trio.to_thread.run_sync(run)


async def test_chat_whole() -> None:
    def use(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="fake-model", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 39
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        assert answer.choices[0].logprobs.content[0].token == "<"

    async with serving() as server:
        await in_thread(server, use)


async def test_chat_stream_with_two_choices() -> None:
    def use(client: openai.OpenAI) -> None:
        texts = {0: "", 1: ""}
        usage = None
        for chunk in client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage or usage
        assert texts == {0: ANSWER, 1: ANSWER}
        assert usage is not None
        assert usage.completion_tokens == 40

    async with serving() as server:
        await in_thread(server, use)


async def test_completions_whole_and_streamed() -> None:
    def use(client: openai.OpenAI) -> None:
        whole = client.completions.create(model="fake-model", prompt=["ab", "cd"], logprobs=1)
        assert [choice.text for choice in whole.choices] == ["AB", "CD"]
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens == ["A", "B"]
        stream = client.completions.create(model="fake-model", prompt="abc", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "ABC"

    async with serving() as server:
        await in_thread(server, use)


async def test_models_and_embeddings() -> None:
    def use(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["fake-model"]
        assert client.models.retrieve("fake-model").owned_by == "pyserve"
        # the client asks for base64 by itself, and decodes it
        answer = client.embeddings.create(model="fake-model", input=["a", "b"])
        assert answer.data[1].embedding == pytest.approx([0.6, 0.0, 0.8, 0.0])

    async with serving() as server:
        await in_thread(server, use)


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
    ],
)
async def test_errors_are_the_clients_own(
    change: Any, kind: type[openai.APIStatusError], param: str
) -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises(kind) as raised:
            client.chat.completions.create(
                **{"model": "fake-model", "messages": MESSAGES, **change}
            )
        assert raised.value.param == param
        assert raised.value.request_id

    async with serving() as server:
        await in_thread(server, use)


async def test_rate_limit_error() -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="fake-model", prompt="ab")
        assert raised.value.response.headers["retry-after"] == "3"

    async with serving(engine={"max_open": 0}) as server:
        await in_thread(server, use)


async def test_error_in_mid_stream_is_raised_by_the_client() -> None:
    def use(client: openai.OpenAI) -> None:
        stream = client.completions.create(model="fake-model", prompt="abcdef", stream=True)
        with pytest.raises(openai.APIError, match="poison"):
            list(stream)

    async with serving(engine={"fail_with": StepFailed("poison"), "fail_after": 2}) as server:
        await in_thread(server, use)


async def test_many_requests_of_the_asynchronous_client_at_once() -> None:
    async def use(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def ask(text: str) -> str:
                stream = await client.completions.create(
                    model="fake-model", prompt=text, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(f"number {i}") for i in range(32)))

    async with serving() as server:
        answers = await trio.to_thread.run_sync(partial(asyncio.run, use(server.url)))
        assert answers == [f"NUMBER {i}" for i in range(32)]
