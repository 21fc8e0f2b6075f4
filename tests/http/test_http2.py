"""HTTP/2 for clients with prior knowledge: the same answers, and back-pressure that holds."""

from __future__ import annotations

import h2.config
import h2.connection
import httpx

from pyserve.testing.streams import open_wire_client
from tests.http.serving import serving
from tests.http.test_generation import endless, events_of, slowly


async def test_the_same_answers_over_http2() -> None:
    async with (
        serving() as server,
        httpx.AsyncClient(base_url=server.url, http1=False, http2=True) as client,
    ):
        answer = await client.get("/livez")
        assert (answer.http_version, answer.status_code) == ("HTTP/2", 200)
        answer = await client.post("/v1/completions", json={"prompt": "abc", "stream": True})
        assert events_of(answer)[-1]["choices"][0]["finish_reason"] == "stop"
        answer = await client.post("/v1/completions", json={"prompt": ""})
        assert answer.status_code == 400


async def test_http2_client_whose_window_is_used_up_is_given_up() -> None:
    async with (
        serving(engine={"reply": endless, "pace": slowly}, write_timeout_s=0.1) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        wire = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        wire.initiate_connection()
        body = b'{"prompt": "abc", "stream": true, "max_tokens": 4000, "n": 32, "logprobs": 1}'
        wire.send_headers(
            1,
            [
                (":method", "POST"),
                (":path", "/v1/completions"),
                (":authority", "x"),
                (":scheme", "http"),
                ("content-type", "application/json"),
            ],
        )
        wire.send_data(1, body, end_stream=True)
        await client.send(wire.data_to_send())
        await server.engine.until_open()
        await server.engine.until_idle()  # our window of 64 KiB is never opened again
        assert len(server.engine.abandoned) == 1
        assert (await server.get("/livez")).status_code == 200
