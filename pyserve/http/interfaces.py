"""What the HTTP layer needs of the rest of the house, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from pyserve.core.events import ChoiceFinished, Embedding, Started, Token
from pyserve.core.spec import RequestSpec
from pyserve.engine.stop_strings import StopStrings
from pyserve.errors import RequestError

StreamEvent = Started | Token | Embedding | ChoiceFinished


class InfoLike(Protocol):
    """What is loaded; sizes in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...


class StreamMetrics(Protocol):
    """Where a request's time went, seconds; None while it has not happened."""

    @property
    def queue_s(self) -> float | None: ...
    @property
    def prefill_s(self) -> float | None: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def total_s(self) -> float | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...


class StreamLike(Protocol):
    """One request's events, from the engine."""

    @property
    def metrics(self) -> StreamMetrics: ...
    async def receive(self) -> list[StreamEvent]:
        """At least one event; raises trio.EndOfChannel after the end, the error where it failed."""

    def stop_choice(self, index: int) -> None:
        """Ends a choice at the next step boundary."""


class EngineLike(Protocol):
    """An open engine."""

    @property
    def info(self) -> InfoLike: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def now(self) -> float:
        """The clock that deadlines are on, seconds."""

    def statistics(self) -> Any:
        """A frozen dataclass of everything there is to know."""

    def request(self, spec: RequestSpec) -> AbstractAsyncContextManager[StreamLike]:
        """Admits a request (or raises what its client should be told); leaving the scope cancels it."""

    def begin_drain(self) -> None:
        """Admits nothing from now on."""

    async def drained(self, timeout_s: float) -> bool:
        """Waits until nothing is open."""

    def cancel_all(self, error: RequestError) -> None:
        """Ends every open request with ``error``."""


class ChatTemplateLike(Protocol):
    """A model's own chat template."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extras: Any,
    ) -> list[int]: ...


class TokenizerLike(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def chat_template(self) -> ChatTemplateLike | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, id_: int, /) -> bytes: ...
    def token_text(self, id_: int, /) -> str: ...


class TextDeltaLike(Protocol):
    """Text that can no longer change, with the tokens that it came from."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> tuple[Token, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def stopped(self) -> str | None: ...


class Assembler(Protocol):
    """Turns one choice's tokens into text, and finds stop strings."""

    def push(self, tokens: Sequence[Token]) -> TextDeltaLike: ...
    def finish(self, reason: Any) -> TextDeltaLike: ...


class AssemblerFactory(Protocol):
    """Makes an assembler for one choice."""

    def __call__(
        self,
        tokenizer: Any,
        *,
        stop: StopStrings | tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> Assembler: ...
