"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from quart import Blueprint, Response

from pyserve.errors import InvalidRequest
from pyserve.http.routes.common import body_of, json
from pyserve.http.schema import DetokenizeRequest, TokenizeRequest
from pyserve.http.shapes import Detokenized, Tokenized
from pyserve.http.state import ServerState
from pyserve.http.work import check_model, encode_chat, off_loop


def blueprint(state: ServerState) -> Blueprint:
    """The tokenizer family."""
    routes = Blueprint("tokens", __name__)

    @routes.post("/tokenize")
    async def tokenize() -> Response:
        body = body_of(TokenizeRequest)
        check_model(state, body.model)
        if (body.prompt is UNSET) == (body.messages is UNSET):
            raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
        ids = await _encode(state, body)
        texts = [state.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return json(Tokenized(len(ids), state.context_length, ids, texts))

    @routes.post("/detokenize")
    async def detokenize() -> Response:
        body = body_of(DetokenizeRequest)
        check_model(state, body.model)
        size = state.engine.info.vocab_size
        if body.tokens and max(body.tokens) >= size:
            message = f"token id {max(body.tokens)} is beyond the vocabulary of {size}"
            raise InvalidRequest(message, param="tokens")

        def decode() -> str:
            return state.tokenizer.decode(body.tokens, skip_special_tokens=False)

        return json(Detokenized(await off_loop(decode, len(body.tokens))))

    return routes


async def _encode(state: ServerState, body: TokenizeRequest) -> list[int]:
    if not isinstance(body.messages, UnsetType):
        return await encode_chat(
            state,
            body.messages,
            generation_prompt=body.add_generation_prompt is not False,
            extras=body.chat_template_kwargs,
        )
    assert not isinstance(body.prompt, UnsetType)
    prompt, special = body.prompt, body.add_special_tokens is not False

    def encode() -> list[int]:
        return state.tokenizer.encode(prompt, add_special_tokens=special)

    return await off_loop(encode, len(prompt))
