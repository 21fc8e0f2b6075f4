"""The HTTP layer on the real engine and scheduler; only the model is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np
import trio
from prometheus_client.parser import text_string_to_metric_families

from pyserve.backends.scripted import ScriptedBackend
from pyserve.engine.engine import Engine
from pyserve.http.auth import KeyRing
from pyserve.http.config import HttpConfig
from pyserve.http.server import serve_http
from pyserve.http.state import ServerState
from pyserve.telemetry.engine import engine_samples, load_snapshot
from pyserve.telemetry.metrics import Metrics
from pyserve.testing.engine import open_scripted_engine
from tests.http.fakes import CharTokenizer, FakeAssembler
from tests.http.test_generation import events_of


def count_on(context: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """The next character of the alphabet; after "z" the end."""
    return int(context[-1]) + 1 if context[-1] != ord("z") else 3


@asynccontextmanager
async def serving_scripted(
    backend: ScriptedBackend | None = None, **scheduler: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    backend = backend or ScriptedBackend(vocab_size=128, eos_token_ids=(3,), continuation=count_on)
    async with (
        open_scripted_engine(backend, driver="thread", **scheduler) as engine,
        trio.open_nursery() as nursery,
    ):
        metrics = Metrics("scripted")
        metrics.add_source(partial(engine_samples, engine))
        state = ServerState(
            engine=engine,
            tokenizer=CharTokenizer(),
            assembler=FakeAssembler,
            keys=KeyRing(),
            metrics=metrics,
            context_length=engine.config.scheduler.max_sequence_tokens,
            snapshot=partial(load_snapshot, engine),
        )
        (url,) = await nursery.start(serve_http, state, HttpConfig(port=0))
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client, engine
        state.shutdown.set()


async def test_whole_and_streamed_answers_agree() -> None:
    async with serving_scripted() as (client, engine):
        body = {"prompt": "abcdef", "temperature": 0, "max_tokens": 30, "n": 2}
        whole = (await client.post("/v1/completions", json=body)).json()
        texts = {0: "", 1: ""}
        for event in events_of(await client.post("/v1/completions", json={**body, "stream": True})):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "ghijklmnopqrstuvwxyz", 1: "ghijklmnopqrstuvwxyz"}
        assert [choice["text"] for choice in whole["choices"]] == list(texts.values())
        assert whole["usage"]["completion_tokens"] == 42
        again = (await client.post("/v1/completions", json=body)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert engine.statistics().open_requests == 0


async def test_stop_string_ends_the_sequence_in_the_engine() -> None:
    async with serving_scripted() as (client, _):
        body = {"prompt": "a", "temperature": 0, "max_tokens": 60, "stop": ["ef"]}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == "bcd"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5


async def test_poison_harms_only_itself() -> None:
    backend = ScriptedBackend(vocab_size=128, continuation=count_on, poison_tokens=[ord("!")])
    async with serving_scripted(backend) as (client, _):
        statuses: dict[str, int] = {}

        async def ask(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
            statuses[prompt] = (await client.post("/v1/completions", json=body)).status_code

        async with trio.open_nursery() as nursery:
            for prompt in ("a", "b", "!", "c"):
                nursery.start_soon(ask, prompt)
        assert statuses == {"a": 200, "b": 200, "!": 500, "c": 200}


async def test_errors_of_admission_reach_the_client() -> None:
    async with serving_scripted(context_length=64) as (client, _):
        body = {"prompt": "a", "max_tokens": 64}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await client.post("/v1/completions", json={"prompt": "a", "timeout_ms": 10**6})
        assert answer.status_code == 200


async def test_jobs_run_beside_each_other() -> None:
    async with serving_scripted() as (client, _):
        jobs = []
        for text in "abcde":
            body = {"prompt": text, "max_tokens": 3, "temperature": 0}
            jobs.append((await client.post("/submit", json=body)).json()["id"])
        texts = []
        for job in jobs:
            done = (await client.get(f"/v1/jobs/{job}?wait=30")).json()
            texts.append(done["result"]["choices"][0]["text"])
        assert texts == ["bcd", "cde", "def", "efg", "fgh"]


async def test_embedding_comes_from_the_engine() -> None:
    async with serving_scripted() as (client, _):
        answer = (await client.post("/v1/embeddings", json={"input": ["ab", "cd"]})).json()
        for item in answer["data"]:
            assert len(item["embedding"]) == 8
            assert abs(sum(value * value for value in item["embedding"]) - 1) < 1e-5


# the names that dashboards of the ecosystem ask for, beside the histograms
ALIASES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:admission_rejections_total",
    "vllm:cache_config_info",
    "vllm:num_requests_waiting_by_reason",
    "vllm:iteration_tokens_total_count",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_success_total",
}


async def test_metrics_and_health_speak_of_the_engine() -> None:
    async with serving_scripted() as (client, _):
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
        text = (await client.get("/metrics")).text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found.keys() >= ALIASES
        assert found["pyserve_prompt_tokens_total"] == 3
        assert found["vllm:iteration_tokens_total_sum"] == 3 + 4  # the last token is not fed back
        assert found["vllm:iteration_tokens_total_count"] == 5
        assert found["pyserve_kv_cache_usage_ratio"] == 0
        health = (await client.get("/health")).json()
        assert health["status"] == "ok"
        assert health["requests_running"] == health["requests_waiting"] == 0
