"""A small client of the HTTP interface, for the commands that a person types at a terminal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from pyserve.errors import PyserveError


class ServerError(PyserveError):
    """The server could not be reached, or answered with an error; the message is for a person."""


class Client:
    """One server. ``url`` without a path; ``api_key`` is sent as a bearer token where given."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=None)  # an answer may take as long as the line is
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self.url = url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def model(self) -> dict[str, Any]:
        """The entry of ``/v1/models`` for the model that is served."""
        with self._guard():
            answer = self._http.get("/v1/models")
            self._check(answer)
            first: dict[str, Any] = answer.json()["data"][0]
            return first

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of ``text`` by the server's tokenizer, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        with self._guard():
            answer = self._http.post("/tokenize", json=body)
            self._check(answer)
            tokens: list[int] = answer.json()["tokens"]
            return tokens

    def blocks_owned(self, patience_s: float = 5.0) -> int | None:
        """KV blocks that requests hold, by ``/metrics``; waits a little for 0. None: not told."""
        end = time.monotonic() + patience_s
        while True:
            with self._guard():
                answer = self._http.get("/metrics")
            found = re.search(
                r'^pyserve_kv_blocks\{[^}]*state="owned"[^}]*\} (\S+)$', answer.text, re.MULTILINE
            )
            if found is None:
                return None
            owned = int(float(found[1]))
            if owned == 0 or time.monotonic() > end:
                return owned
            time.sleep(0.1)

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """POST ``body`` with ``stream`` set and yield each event; raises :class:`ServerError`."""
        with (
            self._guard(),
            self._http.stream("POST", path, json={**body, "stream": True}) as answer,
        ):
            if answer.is_error:
                answer.read()
            self._check(answer)
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"].get("message", data))
                yield event
        raise ServerError("the server closed the connection before the answer was complete")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerError(f"{self.url} is not a server's address: {error}") from error
        except httpx.ConnectError as error:
            raise ServerError(
                f"no server answers at {self.url}; start one with: pyserve serve"
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}: {error or type(error).__name__}") from error

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_error:
            return
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.text[:200] or answer.reason_phrase
        raise ServerError(f"{answer.status_code}: {message}")
