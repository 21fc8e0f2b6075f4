"""Sampling options that ``chat`` and ``complete`` share; what is not given is left to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Add the options; each is named as the field of the body that it fills."""
    for name, kind, text in (
        ("seed", int, "Seed of the random numbers."),
        ("top_p", float, "Draw from the most likely tokens with this probability together."),
        ("temperature", float, "0 takes the most likely token each time."),
        ("max_tokens", int, "Most tokens to generate."),
    ):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=kind, default=None, help=text)(command)
    return command


def given(options: dict[str, object]) -> dict[str, object]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
