from __future__ import annotations

import base64
import json
import struct
import threading
from typing import Any

import httpx
import pytest
import trio

from pyserve.core.spec import RequestSpec
from pyserve.engine.stop_strings import StopStrings
from pyserve.errors import DeadlineExceeded, StepFailed
from tests.http.fakes import CharTokenizer, FakeAssembler, FakeEngine
from tests.http.serving import Serving, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every event; the end mark must be there."""
    *events, last, rest = answer.text.split("\n\n")
    assert last == "data: [DONE]"
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def stream_of(server: Serving, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer)


async def test_completion_has_openais_shape() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 9})).json()
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert answer["choices"] == [
            {
                "index": 0,
                "text": "ABC",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert answer["metrics"]["queue_time_ms"] == 0.0


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cd"], ["AB", "CD"]),
        ([97, 98], ["AB"]),
        ([[97], [98, 99]], ["A", "BC"]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, texts: list[str]) -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", {"prompt": prompt})).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    async with serving() as server:
        body = {"prompt": ["ab", "cd"], "n": 2}
        answer = (await server.post("/v1/completions", body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["AB", "AB", "CD", "CD"]
        texts = dict.fromkeys(range(4), "")
        for event in await stream_of(server, "/v1/completions", body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == ["AB", "AB", "CD", "CD"]


async def test_length_is_a_finish_reason() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["text"] == "AB"


async def test_stop_string_ends_the_text_and_the_choice() -> None:
    async with serving() as server:
        body = {"prompt": "abcd", "stop": "C", "max_tokens": 50}
        answer = (await server.post("/v1/completions", body)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            "AB",
            "stop",
            "C",
        )
        assert answer["usage"]["completion_tokens"] == 3
        body["include_stop_str_in_output"] = True
        answer = (await server.post("/v1/completions", body)).json()
        assert answer["choices"][0]["text"] == "ABC"


async def test_chat_stream_opens_with_the_role_and_ends_with_usage() -> None:
    async with serving() as server:
        body = {**CHAT, "stream_options": {"include_usage": True}}
        events = await stream_of(server, "/v1/chat/completions", body)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(
            choice["delta"].get("content", "") for event in events for choice in event["choices"]
        )
        assert text == "<USER>HI<ASSISTANT>"
        *chunks, ending, usage = events
        assert all(event["usage"] is None for event in chunks)
        assert ending["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 20
        assert usage["metrics"]["total_time_ms"] is not None
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1


async def test_developer_is_system_and_parts_are_joined() -> None:
    async with serving() as server:
        messages = [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ]
        await server.post("/v1/chat/completions", {"messages": messages})
        prompt = "".join(chr(i) for i in server.engine.seen[-1].prompt)
        assert prompt == "<system>be brief<user>a\nb<assistant>"


async def test_chat_max_tokens_defaults_to_what_is_left_of_the_context() -> None:
    async with serving(engine={"context_length": 64}) as server:
        await server.post("/v1/chat/completions", CHAT)
        spec = server.engine.seen[-1]
        assert spec.sampling.max_tokens == 64 - len(spec.prompt)


async def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.1,
        "seed": -1,
        "max_tokens": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [99],
        "logit_bias": {"65": 3},
        "priority": 4,
        "timeout_ms": 1000,
    }
    async with serving() as server:
        answer = await server.post("/v1/completions", {"prompt": "ab", **fields})
        assert answer.status_code == 200, answer.text
        spec = server.engine.seen[-1]
        sampling = spec.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, -0.2)
        assert sampling.seed == 2**64 - 1
        assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 5, True)
        assert sampling.stop_token_ids == (99,)
        assert sampling.logit_bias == ((65, 3.0),)
        assert spec.priority == 4
        assert spec.deadline_s is not None


async def test_greedy_zero_is_not_taken_for_absent() -> None:
    async with serving() as server:
        await server.post("/v1/completions", {"prompt": "ab", "temperature": 0})
        assert server.engine.seen[-1].sampling.temperature == 0.0


async def test_completion_logprobs_are_parallel_lists() -> None:
    async with serving() as server:
        body = {"prompt": "abc", "logprobs": 2}
        logprobs = (await server.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["A", "B", "C"]
        assert logprobs["token_logprobs"] == [-0.25] * 3
        assert logprobs["top_logprobs"][1] == {"B": -0.25, "A": -2.0}
        assert logprobs["text_offset"] == [0, 1, 2]
        offsets: list[int] = []
        for event in await stream_of(server, "/v1/completions", body):
            for choice in event["choices"]:
                offsets += (choice["logprobs"] or {}).get("text_offset", [])
        assert offsets == [0, 1, 2]


async def test_chat_logprobs_are_one_object_a_token() -> None:
    async with serving() as server:
        body = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 2}
        choice = (await server.post("/v1/chat/completions", body)).json()["choices"][0]
        first = choice["logprobs"]["content"][0]
        assert first["token"] == "<"
        assert first["bytes"] == [60]
        assert first["top_logprobs"] == [{"token": "<", "logprob": -0.25, "bytes": [60]}]


async def test_failure_before_the_first_token_has_its_own_status_even_for_a_stream() -> None:
    async with serving(engine={"fail_with": DeadlineExceeded("too late")}) as server:
        answer = await server.post("/v1/completions", {"prompt": "abc", "stream": True})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_failure_in_mid_stream_is_the_last_event() -> None:
    async with serving(engine={"fail_with": StepFailed("poison"), "fail_after": 2}) as server:
        answer = await server.post("/v1/completions", {"prompt": "abcdef", "stream": True})
        assert answer.status_code == 200
        *_, last, rest = answer.text.split("\n\n")
        assert rest == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "step_failed"


async def test_one_failing_prompt_of_several_fails_the_request_and_frees_the_others() -> None:
    async with serving(engine={"fail_with": StepFailed("poison"), "fail_after": 1}) as server:
        answer = await server.post("/v1/completions", {"prompt": ["abc", "def"]})
        assert answer.status_code == 500
        await server.engine.until_idle()


async def test_full_queue_is_a_429_that_says_when_to_retry() -> None:
    async with serving(engine={"max_open": 0}) as server:
        answer = await server.post("/v1/completions", {"prompt": "abc"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "queue_full"


async def test_all_prompts_are_admitted_or_none() -> None:
    async with serving(engine={"max_open": 1}) as server:
        answer = await server.post("/v1/completions", {"prompt": ["abc", "def"]})
        assert answer.status_code == 429
        await server.engine.until_idle()
        assert len(server.engine.abandoned) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels_its_request(stream: bool) -> None:
    async with serving(engine={"reply": endless, "pace": slowly}) as server:
        with trio.CancelScope() as client:

            async def leave() -> None:
                await server.engine.until_open()
                client.cancel()

            server.nursery.start_soon(leave)
            body = {"prompt": "abc", "max_tokens": 4000, "stream": stream}
            await server.post("/v1/completions", body)
        await server.engine.until_idle()
        assert len(server.engine.abandoned) == 1


async def slowly() -> None:
    await trio.sleep(0.001)


def endless(spec: RequestSpec) -> str:
    return "x" * 10_000


async def test_embeddings_have_unit_length_in_both_encodings() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/embeddings", {"input": ["ab", "c"]})).json()
        assert [item["embedding"] for item in answer["data"]] == [[0.6, 0.0, 0.8, 0.0]] * 2
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        body = {"input": "ab", "encoding_format": "base64", "dimensions": 1}
        answer = (await server.post("/v1/embeddings", body)).json()
        assert struct.unpack("<1f", base64.b64decode(answer["data"][0]["embedding"])) == (1.0,)
        body["dimensions"] = 5
        answer = await server.post("/v1/embeddings", body)
        assert answer.json()["error"]["param"] == "dimensions"


async def test_tokenize_and_detokenize_have_vllms_shapes() -> None:
    async with serving() as server:
        answer = (
            await server.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
        ).json()
        assert answer == {
            "count": 2,
            "max_model_len": 4096,
            "tokens": [97, 98],
            "token_strs": ["a", "b"],
        }
        answer = (await server.post("/tokenize", {"messages": CHAT["messages"]})).json()
        assert answer["count"] == len("<user>hi<assistant>")
        answer = (await server.post("/detokenize", {"tokens": [97, 98]})).json()
        assert answer == {"prompt": "ab"}
        assert (await server.post("/tokenize", {})).status_code == 400
        assert (await server.post("/detokenize", {"tokens": [2**30]})).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"input": "ab"}),
        ("/submit", {"prompt": "ab"}),
    ],
)
async def test_timeout_counts_from_arrival_not_from_when_the_text_is_tokenised(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def slow(self: CharTokenizer, text: Any, **options: Any) -> list[int]:
        nonlocal now_s
        now_s += 10
        return [65]

    monkeypatch.setattr(CharTokenizer, "encode", slow)
    monkeypatch.setattr(FakeEngine, "now", lambda engine: now_s)
    async with serving() as server:
        await server.post(path, {**body, "timeout_ms": 1000})
        assert server.engine.seen[-1].deadline_s == pytest.approx(101.0, abs=0.5)


async def test_choices_share_the_automaton_of_their_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One each would cost a client's stop strings n times, on everybody's event loop."""
    given: list[object] = []
    make = FakeAssembler.__init__

    def spy(self: FakeAssembler, tokenizer: CharTokenizer, **options: Any) -> None:
        given.append(options["stop"])
        make(self, tokenizer, **options)

    monkeypatch.setattr(FakeAssembler, "__init__", spy)
    async with serving() as server:
        body = {"prompt": ["ab", "cd"], "n": 3, "stop": ["B", "D"], "max_tokens": 2}
        answer = await server.post("/v1/completions", body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["A"] * 3 + ["C"] * 3
    assert len(given) == 6
    assert all(isinstance(stop, StopStrings) and stop is given[0] for stop in given)


async def test_long_text_is_tokenised_in_a_thread_also_in_many_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()

    def encode(self: CharTokenizer, text: Any, **options: Any) -> list[int]:
        threads.add(threading.get_ident())
        return [65]

    monkeypatch.setattr(CharTokenizer, "encode", encode)
    async with serving() as server:
        await server.post("/v1/completions", {"prompt": "a"})
        assert threads == {threading.get_ident()}
        threads.clear()
        for prompt in ("a" * 20_000, ["a" * 100] * 200):
            await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert threading.get_ident() not in threads
