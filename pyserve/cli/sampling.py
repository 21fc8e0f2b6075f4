"""Sampling options that ``chat`` and ``complete`` share; what is not given is left to the server.

But for the temperature: OpenAI's default of 1, which the server keeps to, makes small models ramble.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Add the options; each is named as the field of the body that it fills."""
    for name, kind, default, text in (
        ("seed", int, None, "Seed of the random numbers."),
        ("top_p", float, None, "Draw from the most likely tokens with this probability together."),
        ("temperature", float, 0.2, "0 takes the most likely token each time."),
        ("max_tokens", int, None, "Most tokens to generate."),
    ):
        flag = "--" + name.replace("_", "-")
        option = click.option(flag, name, type=kind, default=default, show_default=True, help=text)
        command = option(command)
    return command


def given(options: dict[str, object]) -> dict[str, object]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
