"""Encoding in which nothing that a user can type is a control token.

A twin of the tokenizer shares its model (no copy of the vocabulary) but spells every control token with a
secret of this process. Text is text to it, whatever it says; control tokens written by a chat template are
respelled with the secret first, so both kinds live in one string and go through one encode, exactly like
the original would: same splits, same prefix spaces.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pyserve.errors import InvalidRequest


class GuardedEncoder:
    """Encodes text with ``control`` tokens (id -> spelling) out of reach."""

    def __init__(self, backend: Backend) -> None:
        # Two secrets: marks are in what templates see and may say in an error; they only ever make text.
        mark, nonce = secrets.token_hex(12), secrets.token_hex(12)
        self._open, self._close = f"<{mark}:", f":{mark}>"
        added = backend.get_added_tokens_decoder()
        control = {token.content: id_ for id_, token in added.items() if token.special}
        self._respelled = {text: f"<{nonce}|{id_}|{nonce}>" for text, id_ in control.items()}
        longest_first = "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True))
        self._control = re.compile(longest_first or r"(?!)")
        opening, closing = re.escape(self._open), re.escape(self._close)
        self._marked = re.compile(
            f"{opening}({longest_first or '(?!)'}){closing}|({longest_first or '(?!)'})|{opening}|{closing}"
        )
        self._backend, self._ids = _twin(backend, added, self._respelled, nonce)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without any control token or added prefix."""
        ids = encode_text(self._backend, text)
        return [self._ids.get(id_, id_) for id_ in ids] if self._ids else ids

    def mark(self, value: Any) -> Any:
        """``value`` (strings in lists and mappings, at any depth) with control tokens marked as text.

        A marked token still contains its spelling, so a template that looks for it in a message finds it.
        """
        match value:
            case str():
                return self._control.sub(lambda m: self._open + m[0] + self._close, value)
            case Mapping():
                return {key: self.mark(item) for key, item in value.items()}
            case list() | tuple():
                return [self.mark(item) for item in value]
            case _:
                return value

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a rendered template: unmarked control tokens are control, marked ones are text."""

        def respell(match: re.Match[str]) -> str:
            if match[2] is not None:
                return self._respelled[match[2]]
            return match[1] or ""

        return self.encode(self._marked.sub(respell, rendered))

    def unmark(self, rendered: str) -> str:
        """A rendered template (or a template's error) as a reader would see it."""
        return rendered.replace(self._open, "").replace(self._close, "")


def encode_text(backend: Backend, text: str) -> list[int]:
    """Ids of ``text``, the GIL released meanwhile (only the batch calls of the library do so).

    Raises InvalidRequest for text that is not Unicode (an unpaired surrogate).
    """
    try:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # the one kind of str that the library refuses
        raise InvalidRequest(
            "The text is not valid Unicode: it has an unpaired surrogate."
        ) from error
    return ids


def _twin(
    backend: Backend, added: Mapping[int, AddedToken], respelled: Mapping[str, str], nonce: str
) -> tuple[Backend, dict[int, int]]:
    """The twin, and its ids of added tokens -> the original's (where they differ)."""
    twin = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if (value := getattr(backend, part)) is not None:
            setattr(twin, part, value)
    # A new token gets the id "number of tokens": fill the holes of a sparse vocabulary so that it is free.
    model_ids = twin.get_vocab(with_added_tokens=False).values()
    holes = max(model_ids, default=-1) + 1 - len(model_ids)
    fill = [AddedToken(f"<{nonce}#{n}#{nonce}>", special=True) for n in range(holes)]
    tokens = {id_: _respell(token, respelled) for id_, token in sorted(added.items())}
    twin.add_tokens([*fill, *tokens.values()])
    pairs = ((twin.token_to_id(token.content), id_) for id_, token in tokens.items())
    return twin, {new: id_ for new, id_ in pairs if new is not None and new != id_}


def _respell(token: AddedToken, respelled: Mapping[str, str]) -> AddedToken:
    return AddedToken(
        respelled.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
