"""The inference endpoints, raw ASGI: everything a request acquires lives in one structured scope.

(Behind a framework's ``Response(generator)``, what a handler acquires would leak if the client left before
the first iteration.)
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec
import trio

from pyserve.core.events import Embedding
from pyserve.core.spec import RequestSpec, SamplingParams, Task
from pyserve.errors import InvalidRequest, RequestError
from pyserve.http.asgi import Endpoint
from pyserve.http.config import HttpConfig
from pyserve.http.context import Receive, RequestContext, Responder, new_id
from pyserve.http.generate import Delta, Outcome, generate
from pyserve.http.idempotency import Idempotency
from pyserve.http.limits import KeyLimits
from pyserve.http.prepare import Prepared, prepare_chat, prepare_completion
from pyserve.http.render import Collector
from pyserve.http.schema import ChatRequest, CompletionRequest, EmbeddingRequest
from pyserve.http.shapes import EmbeddingItem, EmbeddingList, EmbeddingUsage
from pyserve.http.state import ServerState
from pyserve.http.validate import parse
from pyserve.http.work import check_model, encode_prompts, scheduling


class Inference:
    """The three endpoints that work while their client waits."""

    def __init__(
        self, state: ServerState, config: HttpConfig, limits: KeyLimits, idempotency: Idempotency
    ) -> None:
        self._state = state
        self._config = config
        self._limits = limits
        self._idempotency = idempotency

    def endpoints(self) -> Mapping[str, Endpoint]:
        """By path; each leaves when its client does, and is done once per ``Idempotency-Key``."""
        return {
            "/v1/completions": self._guarded(self._completions),
            "/v1/chat/completions": self._guarded(self._chat),
            "/v1/embeddings": self._guarded(self._embeddings),
        }

    def _guarded(self, handler: Callable[[RequestContext, Responder], Awaitable[None]]) -> Endpoint:
        async def endpoint(context: RequestContext, receive: Receive, responder: Responder) -> None:
            async def work() -> None:
                await self._idempotency.once(context, responder, handler)

            await _while_connected(receive, work)

        return endpoint

    async def _completions(self, context: RequestContext, responder: Responder) -> None:
        body, ignored = parse(context.body, CompletionRequest)
        context.ignored(ignored)
        prepared = await prepare_completion(
            self._state,
            context.key,
            body,
            arrival_s=context.arrival_s,
            max_prompts=self._config.max_prompts,
        )
        await self._generate(context, responder, prepared, bool(body.stream))

    async def _chat(self, context: RequestContext, responder: Responder) -> None:
        body, ignored = parse(context.body, ChatRequest)
        context.ignored(ignored)
        prepared = await prepare_chat(self._state, context.key, body, arrival_s=context.arrival_s)
        await self._generate(context, responder, prepared, bool(body.stream))

    async def _generate(
        self, context: RequestContext, responder: Responder, prepared: Prepared, stream: bool
    ) -> None:
        work, renderer = prepared
        context.log["prompt_tokens"] = work.prompt_tokens
        collected = Collector(sum(spec.n for spec in work.specs))

        async def write(deltas: list[Delta]) -> None:
            # The answer starts with the first token, so that whatever fails before has its own status.
            await responder.start_stream()
            await responder.write(renderer.events(deltas))

        async def collect(deltas: list[Delta]) -> None:
            collected.add(deltas)

        with self._limits.hold(context.key, work.most_tokens) as lease:
            outcome = await generate(self._state, work, write if stream else collect)
            lease.used(outcome.usage.total_tokens)
        _log_outcome(context, outcome)
        if stream:
            await responder.start_stream()
            await responder.write(renderer.last(outcome))
            await responder.end_stream()
        else:
            answer = renderer.whole(collected, outcome)
            await responder.json(200, msgspec.json.encode(answer))

    async def _embeddings(self, context: RequestContext, responder: Responder) -> None:
        body, ignored = parse(context.body, EmbeddingRequest)
        context.ignored(ignored)
        check_model(self._state, body.model)
        size = self._state.engine.info.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise InvalidRequest(
                f"this model's embeddings have {size} dimensions", param="dimensions"
            )
        prompts = await encode_prompts(
            self._state, body.input, "input", limit=self._config.max_prompts, output=0
        )
        fields = scheduling(self._state, context.key, body, context.arrival_s)
        request_id = new_id("embd")
        specs = [
            RequestSpec(
                request_id=f"{request_id}-{index}",
                prompt=tuple(prompt),
                sampling=SamplingParams(max_tokens=1),
                task=Task.EMBED,
                **fields,
            )
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(len(prompt) for prompt in prompts)
        context.log["prompt_tokens"] = tokens
        with self._limits.hold(context.key, tokens):
            vectors = await self._embed(specs)
        encode = _base64 if body.encoding_format == "base64" else list
        items = [
            EmbeddingItem(index=index, embedding=encode(unit_length(vector, body.dimensions)))
            for index, vector in enumerate(vectors)
        ]
        answer = EmbeddingList(
            data=items, model=self._state.model, usage=EmbeddingUsage(tokens, tokens)
        )
        context.log["finish_reason"] = "stop"
        await responder.json(200, msgspec.json.encode(answer))

    async def _embed(self, specs: Sequence[RequestSpec]) -> list[tuple[float, ...]]:
        """All at once, each in its own engine request; received in order."""
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._state.engine.request(spec)) for spec in specs
            ]
            vectors = []
            for stream in streams:
                vector: tuple[float, ...] = ()
                while True:
                    try:
                        events = await stream.receive()
                    except trio.EndOfChannel:
                        break
                    for event in events:
                        if isinstance(event, Embedding):
                            vector = event.values
                vectors.append(vector)
            return vectors


def unit_length(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` values (all where None), scaled to length one as OpenAI's are."""
    head = list(vector[:dimensions])
    norm = math.sqrt(math.fsum(value * value for value in head))
    return [value / norm for value in head] if norm > 0 else head


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def _log_outcome(context: RequestContext, outcome: Outcome) -> None:
    context.log.update(
        output_tokens=outcome.usage.completion_tokens,
        queue_ms=outcome.timings.queue_time_ms,
        ttft_ms=None if outcome.ttft_s is None else round(outcome.ttft_s * 1e3, 3),
        batch_size=outcome.timings.batch_size,
        finish_reason=",".join(dict.fromkeys(outcome.finish_reasons)),
    )
    details = outcome.usage.prompt_tokens_details
    context.log["cached_tokens"] = details.cached_tokens if details else 0


async def _while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Runs ``work``, cancelled as soon as the client leaves; raises its RequestError as it is."""
    failure: RequestError | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            await work()
        except RequestError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
