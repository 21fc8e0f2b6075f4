"""The official client and the real model, through a real socket and a real process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.process import Server, running

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**fields)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_stop_string_never_shows_even_in_part(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="1 2 3 4 5 6", temperature=0, max_tokens=16, stop=[" 9 10"], stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == " 7 8"


def test_logprobs_agree_with_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    )
    choice = answer.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs,
        strict=True,
    ):
        assert top[token] == logprob == max(top.values())


def test_same_seed_same_text(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, seed=7
        ).choices[0].text
        for _ in range(2)
    }  # fmt: skip
    assert len(texts) == 1


def test_embeddings_of_like_texts_are_alike(client: openai.OpenAI) -> None:
    texts = ["A cat sat on the mat.", "A cat sat on a mat.", "Quarterly revenue rose by 4%."]
    answer = client.embeddings.create(model=MODEL, input=texts)
    cat, same, money = (item.embedding for item in answer.data)

    def alike(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert alike(cat, same) > alike(cat, money)


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=QUESTION, top_p=7)
    assert raised.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt="word " * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_asynchronous_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = [f"The number after {i} is" for i in range(8)]

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=6, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            alone = [await ask(client, prompt) for prompt in prompts]
            assert together == alone

    asyncio.run(both())
