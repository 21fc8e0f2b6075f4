"""From sampled tokens to the text a client may see: detokenising, stop strings, logprobs kept in step.

Runs on the Trio side, once per token of every stream, so it is kept cheap: a few microseconds a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pyserve.core.events import FinishReason, Token
from pyserve.engine.stop_strings import StopMatcher, StopStrings
from pyserve.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain, the tokens whose text is now all out, and what stopped it, if anything.

    ``offsets[i]`` is where the text of ``tokens[i]`` starts, in characters from the start of the output.
    ``stopped`` is the stop string that ended the text (its choice should be stopped; later pushes give
    nothing).
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()
    stopped: str | None = None


@dataclass(slots=True)
class _Held:
    """A token not released yet; its text is ``[start, end)`` of the output."""

    token: Token
    start: int
    end: int


class TextAssembler:
    """Assembles the text of one choice.

    Text that may turn out to be the start of a stop string is held back: exactly the longest suffix that
    is a proper prefix of one. The text ends before the first stop string to be complete (the longest of
    those that end there), after it with ``include_stop``. Tokens are released with the last character of
    their text, or when the stop string cuts it; those wholly inside a stop string never are.

    ``stop_token_ids`` end a choice and have no text either (``include_stop``: they do). Stop strings that
    end within the first ``min_tokens`` tokens do not count. ``continues``: the output follows a prompt, so
    the space that SentencePiece models put before a text is part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: StopStrings | Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        continues: bool = True,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skip_special_tokens, continues=continues
        )
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._silent = frozenset() if include_stop else frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._seen = 0
        self._length = 0  # characters of the output so far, released or held
        self._released = 0  # characters released
        self._held_text = ""  # the output in [_released, _length)
        self._waiting: deque[_Held] = deque()
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None while none did."""
        return self._stopped

    def push(self, tokens: Sequence[Token]) -> TextDelta:
        """Text and tokens that ``tokens`` (all of this choice, in order) make certain."""
        for token in tokens:
            if self._stopped is not None:
                break
            self._take(token)
        return self._release(hold=True)

    def finish(self, reason: FinishReason = FinishReason.STOP) -> TextDelta:
        """Everything still held back: the choice is complete.

        A last, unfinished character becomes U+FFFD, except where only the length limit cut it off: there it
        is left out.
        """
        if self._stopped is None:
            if reason is not FinishReason.LENGTH:
                self._append(self._detokenizer.finish())
            for held in self._waiting:
                held.end = min(held.end, self._length)
        return self._release(hold=False)

    def _take(self, token: Token) -> None:
        self._seen += 1
        start = self._length
        text = "" if token.token in self._silent else self._detokenizer.push(token.token)
        # A token that ends inside a character lasts until that character is there.
        partial = self._detokenizer.partial
        if text or partial:
            self._append(text)
        self._waiting.append(_Held(token, start, self._length + partial))

    def _append(self, text: str) -> None:
        """Adds to the output, up to the end of the first stop string."""
        if self._matcher is not None and self._seen > self._min_tokens:
            match = self._matcher.feed(text)
            if match is not None:
                end, self._stopped = match
                text = text[:end]
        self._held_text += text
        self._length += len(text)

    def _release(self, *, hold: bool) -> TextDelta:
        if self._stopped is not None:
            cut = self._length if self._include_stop else self._length - len(self._stopped)
        elif hold and self._matcher is not None:
            cut = self._length - self._matcher.held
        else:
            cut = self._length
        cut = max(cut, self._released)  # after the end: nothing more
        text = self._held_text[: cut - self._released]
        self._held_text = self._held_text[cut - self._released :]
        self._released = cut
        tokens, offsets = self._release_tokens(cut)
        if self._stopped is not None:
            self._waiting.clear()
            self._held_text, self._length = "", cut
        return TextDelta(text, tokens, offsets, self._stopped)

    def _release_tokens(self, cut: int) -> tuple[tuple[Token, ...], tuple[int, ...]]:
        waiting = self._waiting
        tokens, offsets = [], []
        while waiting:
            first = waiting[0]
            if first.end > cut and not (self._stopped is not None and first.start < cut):
                break
            tokens.append(first.token)
            offsets.append(first.start)
            waiting.popleft()
        return tuple(tokens), tuple(offsets)
