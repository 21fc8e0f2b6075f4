"""Log-probabilities in OpenAI's two styles."""

from __future__ import annotations

from collections.abc import Sequence

from pyserve.core.events import Token
from pyserve.http.interfaces import TokenizerLike
from pyserve.http.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_LOWEST = -9999.0  # OpenAI's number for "as good as impossible"; JSON has no -inf


def chat_logprobs(tokenizer: TokenizerLike, tokens: Sequence[Token]) -> ChatLogprobs:
    """One object a token."""
    content = []
    for token in tokens:
        if token.logprobs is None:
            continue
        top = [
            TopLogprob(tokenizer.token_text(i), _finite(p), list(tokenizer.token_bytes(i)))
            for i, p in token.logprobs.top
        ]
        text, data = tokenizer.token_text(token.token), tokenizer.token_bytes(token.token)
        content.append(TokenLogprob(text, _finite(token.logprobs.logprob), list(data), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: TokenizerLike, tokens: Sequence[Token], offsets: Sequence[int], top: int
) -> CompletionLogprobs:
    """Parallel lists; ``offsets`` is where each token's text begins in the choice's text, in characters.

    ``top_logprobs`` holds the ``top`` likeliest tokens and the chosen one, as OpenAI's does.
    """
    texts, chosen, shown_offsets, likeliest = [], [], [], []
    for token, offset in zip(tokens, offsets, strict=True):
        if token.logprobs is None:
            continue
        texts.append(tokenizer.token_text(token.token))
        chosen.append(_finite(token.logprobs.logprob))
        shown_offsets.append(offset)
        best = {tokenizer.token_text(i): _finite(p) for i, p in token.logprobs.top[:top]}
        best.setdefault(texts[-1], chosen[-1])
        likeliest.append(best)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=chosen,
        top_logprobs=likeliest if top else None,
        text_offset=shown_offsets,
    )


def _finite(value: float) -> float:
    return max(value, _LOWEST)
