"""``pyserve chat``: a conversation in the terminal, streamed; the server keeps nothing of it."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console

from pyserve.cli.client import Client, ServerError
from pyserve.cli.options import client_options
from pyserve.cli.sampling import given, sampling_options

HELP = "[dim]/reset forgets the conversation, /quit (or ctrl-D) ends, ctrl-C stops an answer[/dim]"


@click.command()
@click.argument("message", required=False)
@client_options
@sampling_options
@click.option("--system", help="System message.")
def chat(
    message: str | None, url: str, api_key: str | None, system: str | None, **sampling: object
) -> None:
    """Talk to a running server. With MESSAGE: one question, one answer."""
    console = Console(highlight=False)
    with Client(url, api_key) as client:
        model = client.model()["id"]
        conversation = Conversation(client, console, model, system, given(sampling))
        if message is not None:
            conversation.ask(message)
            return
        console.print(f"[bold]{model}[/bold] at {url}\n{HELP}")
        while (text := _read(console)) is not None:
            match text.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    break
                case "/reset":
                    conversation.reset()
                case _:
                    conversation.try_to_ask(text)


class Conversation:
    """The messages so far. A question whose answer failed is taken back, so that it can be put again."""

    def __init__(
        self,
        client: Client,
        console: Console,
        model: str,
        system: str | None,
        sampling: dict[str, object],
    ) -> None:
        self._client = client
        self._console = console
        self._body = {"model": model, "stream_options": {"include_usage": True}, **sampling}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def try_to_ask(self, text: str) -> None:
        """Ask, and show what goes wrong instead of raising it."""
        try:
            self.ask(text)
        except ServerError as error:
            self._console.print(f"[red]{error}[/red]")

    def ask(self, text: str) -> None:
        """Ask and print the answer as it comes. ctrl-C keeps what has come. Raises ServerError."""
        question = {"role": "user", "content": text}
        body = {**self._body, "messages": [*self.messages, question]}
        parts: list[str] = []
        usage: dict[str, Any] | None = None
        start, first = time.monotonic(), None
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    content = choice["delta"].get("content")
                    if content:
                        first = first or time.monotonic()
                        parts.append(content)
                        self._console.out(content, end="", highlight=False)
        except KeyboardInterrupt:
            self._console.print("[dim] (stopped)[/dim]", end="")
        finally:
            self._console.print()
        self.messages += [question, {"role": "assistant", "content": "".join(parts)}]
        if usage and first and self._console.is_terminal:
            self._console.print(
                f"[dim]{_rate(usage, first - start, time.monotonic() - first)}[/dim]"
            )


def _rate(usage: dict[str, Any], ttft_s: float, decode_s: float) -> str:
    tokens = usage["completion_tokens"]
    rate = f", {(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else ""
    return f"{tokens} tokens, first after {ttft_s * 1e3:.0f} ms{rate}"


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold green]> [/bold green]")
    except EOFError:
        return None
    except KeyboardInterrupt:
        console.print()
        return ""
