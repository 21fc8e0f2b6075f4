from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import trio

from pyserve.errors import PyserveError, RateLimited
from pyserve.http.auth import ANONYMOUS, ApiKey, KeyRing
from pyserve.http.limits import KeyLimits
from tests.http.serving import serving


def key(name: str, **fields: Any) -> ApiKey:
    """The key of ``name``, whose secret is its name."""
    return ApiKey(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **fields)


RING = KeyRing([key("alice", weight=2.0), key("bob")])
ALICE = {"authorization": "Bearer alice"}
BOB = {"authorization": "Bearer bob"}


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nobody", "Basic alice", "Bearer é"])
async def test_no_key_or_an_unknown_one_is_a_401(header: str) -> None:
    async with serving(keys=RING) as server:
        headers = {"authorization": header.encode("utf-8")} if header else {}
        answer = await server.client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_operations_are_open() -> None:
    async with serving(keys=RING) as server:
        for path in ("/health", "/livez", "/readyz", "/metrics", "/version", "/docs"):
            assert (await server.get(path)).status_code == 200


async def test_a_key_decides_tenant_weight_and_cache_salt() -> None:
    async with serving(keys=RING) as server:
        for headers in (ALICE, BOB):
            answer = await server.post("/v1/completions", {"prompt": "ab"}, headers=headers)
            assert answer.status_code == 200
        body = {"prompt": "ab", "cache_salt": "mine"}
        await server.post("/v1/completions", body, headers=ALICE)
        alice, bob, salted = server.engine.seen
        assert (alice.tenant, alice.weight, bob.tenant) == ("alice", 2.0, "bob")
        assert len({alice.cache_salt, bob.cache_salt, salted.cache_salt}) == 3
        assert 0 < alice.cache_salt < 2**63


async def test_without_keys_everybody_shares_the_cache() -> None:
    async with serving() as server:
        await server.post("/v1/completions", {"prompt": "ab"})
        spec = server.engine.seen[-1]
        assert (spec.tenant, spec.cache_salt) == ("", 0)


async def test_jobs_belong_to_their_key() -> None:
    async with serving(keys=RING) as server:
        job = (await server.post("/submit", {"prompt": "ab"}, headers=ALICE)).json()["id"]
        assert (await server.get(f"/v1/jobs/{job}", headers=ALICE)).status_code == 200
        assert (await server.get(f"/v1/jobs/{job}", headers=BOB)).status_code == 404
        assert (await server.get("/v1/jobs", headers=BOB)).json()["data"] == []


async def test_concurrency_limit_of_a_key_is_a_429() -> None:
    ring = KeyRing([key("alice", max_concurrent=1), key("bob")])
    async with serving(keys=ring, engine={"gate": trio.Event()}) as server:
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                answer = await server.post("/v1/completions", {"prompt": "ab"}, headers=ALICE)
                assert answer.status_code == 200

            nursery.start_soon(first)
            await server.engine.until_open()
            answer = await server.post("/v1/completions", {"prompt": "ab"}, headers=ALICE)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert server.engine.gate is not None
            server.engine.gate.set()
        answer = await server.post("/v1/completions", {"prompt": "ab"}, headers=ALICE)
        assert answer.status_code == 200


def test_token_rate_refills_and_says_when_to_retry() -> None:
    now = 0.0
    limits = KeyLimits(lambda: now)
    alice = key("alice", tokens_per_minute=60)
    with limits.hold(alice, 50) as lease:
        lease.used(40)
    with pytest.raises(RateLimited) as refused, limits.hold(alice, 30):
        pass
    assert refused.value.retry_after_s == pytest.approx(10.0)
    now = 10.0
    with limits.hold(alice, 30):
        pass


def test_request_larger_than_a_minutes_allowance_runs_when_it_is_full() -> None:
    now = 0.0
    limits = KeyLimits(lambda: now)
    alice = key("alice", tokens_per_minute=60)
    with limits.hold(alice, 1000):
        pass
    with pytest.raises(RateLimited), limits.hold(alice, 1):
        pass


def test_key_files_are_toml_or_json(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    toml = tmp_path / "keys.toml"
    toml.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{digest}"\nweight = 3\n')
    as_json = tmp_path / "keys.json"
    as_json.write_text(json.dumps({"keys": [{"name": "alice", "sha256": digest}]}))
    assert KeyRing.from_file(toml).authenticate("Bearer secret").weight == 3
    assert KeyRing.from_file(as_json).authenticate("bearer secret").name == "alice"
    assert KeyRing().authenticate("") is ANONYMOUS


@pytest.mark.parametrize(
    "text",
    ["", "keys = []", '[[keys]]\nname = "a"', '[[keys]]\nname="a"\nsha256="x"', "nonsense ="],
)
def test_a_wrong_key_file_says_what_is_wrong(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(PyserveError, match=r"keys\.toml"):
        KeyRing.from_file(path)
