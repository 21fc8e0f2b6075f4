from __future__ import annotations

from typing import Any

import pytest
import trio

from pyserve.errors import DeadlineExceeded, StepFailed
from tests.http.serving import Serving, serving
from tests.http.test_generation import endless, slowly


async def submit(server: Serving, **body: Any) -> str:
    answer = await server.post("/submit", {"prompt": "abc", **body})
    assert answer.status_code == 202, answer.text
    job: str = answer.json()["request_id"]
    assert answer.headers["location"] == f"/v1/jobs/{job}"
    return job


async def test_submit_answers_at_once_and_wait_collects() -> None:
    async with serving(engine={"gate": trio.Event()}) as server:
        answer = (await server.post("/v1/jobs", {"prompt": "abc", "metadata": {"a": 1}})).json()
        assert (answer["status"], answer["position"]) == ("queued", 0)
        assert answer["metadata"] == {"a": 1}
        job = answer["id"]
        assert (await server.get(f"/v1/jobs/{job}")).json()["status"] == "queued"
        assert server.engine.gate is not None
        server.engine.gate.set()
        done = (await server.get(f"/v1/jobs/{job}?wait=30")).json()
        assert done["status"] == "succeeded"
        assert done["result"]["choices"][0]["text"] == "ABC"
        assert done["result"]["usage"]["total_tokens"] == 7
        assert done["batch_size"] == 1
        assert done["created_at"] <= done["started_at"] <= done["finished_at"]


async def test_job_with_messages_is_a_chat() -> None:
    async with serving() as server:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        job = (await server.post("/submit", body)).json()["id"]
        done = (await server.get(f"/v1/jobs/{job}?wait=30")).json()
        assert done["result"]["choices"][0]["message"]["content"] == "<USER>HI<ASSISTANT>"


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": ["a", "b"]}],
)
async def test_job_without_exactly_one_prompt_is_a_400(body: Any) -> None:
    async with serving() as server:
        assert (await server.post("/submit", body)).status_code == 400
        assert (await server.get("/v1/jobs")).json()["data"] == []


async def test_full_queue_refuses_the_submission_and_keeps_nothing() -> None:
    async with serving(engine={"max_open": 0}) as server:
        answer = await server.post("/submit", {"prompt": "abc"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert (await server.get("/v1/jobs")).json()["data"] == []


async def test_store_full_of_unfinished_jobs_is_a_429() -> None:
    async with serving(engine={"gate": trio.Event()}, max_jobs=2) as server:
        await submit(server)
        await submit(server)
        assert (await server.post("/submit", {"prompt": "abc"})).status_code == 429


async def test_finished_jobs_make_room() -> None:
    async with serving(max_jobs=2) as server:
        first = await submit(server)
        await server.get(f"/v1/jobs/{first}?wait=30")
        for _ in range(2):
            await server.get(f"/v1/jobs/{await submit(server)}?wait=30")
        assert (await server.get(f"/v1/jobs/{first}")).status_code == 404


async def test_delete_cancels_and_frees() -> None:
    async with serving(engine={"reply": endless, "pace": slowly}) as server:
        job = await submit(server, max_tokens=4000)
        answer = (await server.client.delete(f"/v1/jobs/{job}")).json()
        assert answer["status"] == "cancelled"
        assert answer["error"]["code"] == "cancelled"
        await server.engine.until_idle()
        again = (await server.client.delete(f"/v1/jobs/{job}")).json()
        assert again["status"] == "cancelled"


@pytest.mark.parametrize(
    ("error", "status"),
    [(StepFailed("poison"), "failed"), (DeadlineExceeded("too late"), "expired")],
)
async def test_failed_job_says_why(error: Any, status: str) -> None:
    async with serving(engine={"fail_with": error}) as server:
        done = (await server.get(f"/v1/jobs/{await submit(server)}?wait=30")).json()
        assert (done["status"], done["error"]["code"]) == (status, error.code)


def parsed(text: str) -> list[tuple[int, str]]:
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            events.append((int(lines["id"]), lines["event"]))
    return events


async def test_events_are_numbered_and_resume_behind_the_last_one_seen() -> None:
    async with serving() as server:
        job = await submit(server)
        events = parsed((await server.get(f"/v1/jobs/{job}/events")).text)
        assert [number for number, _ in events] == list(range(1, len(events) + 1))
        assert [kind for _, kind in events][:2] == ["queued", "started"]
        assert events[-1][1] == "succeeded"
        headers = {"last-event-id": "2"}
        again = await server.get(f"/v1/jobs/{job}/events", headers=headers)
        assert parsed(again.text) == events[2:]
        headers = {"last-event-id": str(len(events))}
        assert (await server.get(f"/v1/jobs/{job}/events", headers=headers)).text == ""
        headers = {"last-event-id": "x"}
        assert (await server.get(f"/v1/jobs/{job}/events", headers=headers)).status_code == 400


async def test_events_follow_a_running_job_to_its_end() -> None:
    async with serving(engine={"gate": trio.Event()}) as server:
        job = await submit(server)
        async with server.client.stream("GET", f"/v1/jobs/{job}/events") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "id: 1"
            assert server.engine.gate is not None
            server.engine.gate.set()
            rest = [line async for line in lines]
            assert "event: succeeded" in rest


async def test_list_is_newest_first_by_state_and_paged() -> None:
    async with serving() as server:
        jobs = [await submit(server) for _ in range(5)]
        for job in jobs:
            await server.get(f"/v1/jobs/{job}?wait=30")
        page = (await server.get("/v1/jobs?limit=2")).json()
        assert [job["id"] for job in page["data"]] == [jobs[4], jobs[3]]
        assert page["has_more"] is True
        page = (await server.get(f"/v1/jobs?limit=10&after={page['last_id']}")).json()
        assert [job["id"] for job in page["data"]] == [jobs[2], jobs[1], jobs[0]]
        assert page["has_more"] is False
        assert (await server.get("/v1/jobs?status=queued")).json()["data"] == []
        assert (await server.get("/v1/jobs?status=lost")).json()["error"]["param"] == "status"
        for limit in ("0", "101", "1.5", "nan", "-1", "", "9" * 30):
            answer = await server.get(f"/v1/jobs?limit={limit}")
            assert answer.json()["error"]["param"] == "limit"
        assert (await server.get("/v1/jobs?after=gone")).json()["error"]["param"] == "after"


async def test_position_counts_the_queued_jobs_that_go_first() -> None:
    async with serving(engine={"gate": trio.Event()}) as server:
        low = await submit(server)
        await submit(server)
        await submit(server, priority=5)
        last = (await server.get(f"/v1/jobs/{await submit(server)}")).json()
        assert last["position"] == 3
        assert (await server.get(f"/v1/jobs/{low}")).json()["position"] == 1


async def test_shutdown_ends_every_job_in_exactly_one_final_state() -> None:
    async with serving(engine={"gate": trio.Event()}, drain_timeout_s=0.01) as server:
        job = await submit(server)
        async with trio.open_nursery() as nursery:
            ends: list[str] = []

            async def poll() -> None:
                ends.append((await server.get(f"/v1/jobs/{job}?wait=30")).json()["status"])

            nursery.start_soon(poll)
            await server.get("/livez")
            server.state.shutdown.set()
        assert ends == ["failed"]
        await server.stopped.wait()
