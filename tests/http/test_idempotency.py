from __future__ import annotations

from typing import Any

import httpx
import trio

from tests.http.serving import Serving, serving

KEY = {"idempotency-key": "k1"}
BODY: dict[str, Any] = {"prompt": "abc"}


async def test_same_key_and_body_get_the_same_answer_once_made() -> None:
    async with serving() as server:
        first = await server.post("/v1/completions", BODY, headers=KEY)
        again = await server.post("/v1/completions", BODY, headers=KEY)
        assert again.json() == first.json()
        assert again.headers["x-pyserve-idempotent-replay"] == "true"
        assert len(server.engine.seen) == 1


async def test_same_key_with_another_body_is_a_409() -> None:
    async with serving() as server:
        await server.post("/v1/completions", BODY, headers=KEY)
        answer = await server.post("/v1/completions", {"prompt": "xyz"}, headers=KEY)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "idempotency_conflict"


async def both(server: Serving, body: dict[str, Any]) -> list[httpx.Response]:
    """Two requests at once, the engine let go when the first is in it."""
    gate = server.engine.gate = trio.Event()
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await server.post("/v1/completions", body, headers=KEY))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await server.engine.until_open()
        gate.set()
    return answers


async def test_second_attaches_while_the_first_runs() -> None:
    async with serving() as server:
        one, other = await both(server, BODY)
        assert one.json() == other.json()
        assert len(server.engine.seen) == 1


async def test_second_attaches_to_a_stream_from_its_beginning() -> None:
    async with serving() as server:
        one, other = await both(server, {**BODY, "stream": True})
        assert one.text == other.text
        assert one.text.endswith("data: [DONE]\n\n")
        assert len(server.engine.seen) == 1


async def test_errors_are_not_remembered() -> None:
    async with serving(engine={"max_open": 0}) as server:
        assert (await server.post("/v1/completions", BODY, headers=KEY)).status_code == 429
        server.engine.max_open = 10
        assert (await server.post("/v1/completions", BODY, headers=KEY)).status_code == 200


async def test_follower_takes_over_when_the_first_client_leaves() -> None:
    async with serving() as server:
        gate = server.engine.gate = trio.Event()
        answers: list[httpx.Response] = []
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def leave() -> None:
                with first:
                    await server.post("/v1/completions", BODY, headers=KEY)

            async def ask() -> None:
                answers.append(await server.post("/v1/completions", BODY, headers=KEY))

            nursery.start_soon(leave)
            await server.engine.until_open()
            nursery.start_soon(ask)
            first.cancel()
            await server.engine.until_idle()
            await server.engine.until_open()
            gate.set()
        assert answers[0].status_code == 200
        assert len(server.engine.seen) == 2


async def test_answer_too_large_to_keep_is_a_409_and_not_a_second_run() -> None:
    async with serving(idempotency_bytes=10) as server:
        assert (await server.post("/v1/completions", BODY, headers=KEY)).status_code == 200
        assert (await server.post("/v1/completions", BODY, headers=KEY)).status_code == 409
        assert len(server.engine.seen) == 1


async def test_oldest_answers_make_room() -> None:
    async with serving(idempotency_entries=2) as server:
        for name in ("a", "b", "c"):
            headers = {"idempotency-key": name}
            assert (await server.post("/v1/completions", BODY, headers=headers)).status_code == 200
        await server.post("/v1/completions", BODY, headers={"idempotency-key": "c"})
        assert len(server.engine.seen) == 3
        await server.post("/v1/completions", BODY, headers={"idempotency-key": "a"})
        assert len(server.engine.seen) == 4


async def test_submit_with_the_same_key_is_the_same_job() -> None:
    async with serving() as server:
        one = await server.post("/submit", BODY, headers=KEY)
        other = await server.post("/submit", BODY, headers=KEY)
        assert one.status_code == other.status_code == 202
        assert one.json()["request_id"] == other.json()["request_id"]
        assert other.headers["location"] == one.headers["location"]
