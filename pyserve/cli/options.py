"""Click options made from the table in :mod:`pyserve.config`, and those the clients share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from pyserve.config import OPTIONS, Configuration, Option, load_configuration

Command = TypeVar("Command", bound=Callable[..., Any])

_ALSO = {"model": ("-m",), "drain_timeout_s": ("--drain-timeout",)}


class NumbersType(click.ParamType[tuple[float, ...]]):
    """Positive numbers by commas; ``whole``: integers; ``empty``: nothing between commas, or nothing at all,
    is no number.
    """

    def __init__(self, *, whole: bool, empty: bool = False) -> None:
        self._whole = whole
        self._empty = empty
        self.name = "N,N,..." if whole else "X,X,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Parse, or fail with the usage."""
        if isinstance(value, tuple):
            return value
        parts = [part for part in value.split(",") if part or not self._empty]
        try:
            numbers = tuple((int if self._whole else float)(part) for part in parts)
            valid = all(number > 0 for number in numbers)
        except ValueError:
            valid = False
        if not valid:
            kind = "whole numbers from 1" if self._whole else "numbers above 0"
            self.fail(f"expected {kind} by commas, not {value!r}", param, ctx)
        return numbers


class SectionedCommand(click.Command):
    """A command whose help lists the options by section of the table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One block a section; what is not in the table comes last."""
        rows: dict[str, list[tuple[str, str]]] = {option.section: [] for option in OPTIONS}
        section_of = {option.name: option.section for option in OPTIONS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                rows.setdefault(section_of.get(parameter.name or "", "Other"), []).append(record)
        for section, records in rows.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


def settings_options(*sections: str) -> Callable[[Command], Command]:
    """Add every option of the table (of those ``sections``, where some are named), and ``--config``.

    None means: not given.
    """

    def decorate(command: Command) -> Command:
        for option in reversed(OPTIONS):
            if not sections or option.section in sections:
                command = _click_option(option)(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="TOML file with any of these options. Default: ./pyserve.toml, then the user's own.",
        )(command)

    return decorate


def configuration_from(config_file: Path | None, flags: Mapping[str, object]) -> Configuration:
    """The effective configuration; warns about ``PYSERVE_*`` variables that mean nothing."""
    configuration = load_configuration(flags, file=config_file)
    for name in configuration.unknown_env:
        click.echo(f"Warning: environment variable {name} is not an option; ignored", err=True)
    return configuration


def client_options(command: Command) -> Command:
    """Add ``--url`` and ``--api-key``, for the commands that talk to a server."""
    command = click.option(
        "--api-key", envvar="PYSERVE_API_KEY", help="API key. [env: PYSERVE_API_KEY]"
    )(command)
    return click.option(
        "--url",
        envvar="PYSERVE_URL",
        default="http://127.0.0.1:8000",
        help="The server. [env: PYSERVE_URL; default: http://127.0.0.1:8000]",
    )(command)


def _click_option(option: Option) -> Callable[[Command], Command]:
    declaration = option.flag
    if option.kind.is_flag:
        declaration += "/--no-" + option.flag.removeprefix("--")
    names = [*_ALSO.get(option.name, ()), declaration]
    shown = option.kind.show(option.default)
    suffix = "" if "Default: " in option.help or "auto: " in option.help else f" [{shown}]"
    return click.option(
        *names,
        option.name,
        default=None,
        type=bool if option.kind.is_flag else str,
        metavar=None if option.kind.is_flag else option.kind.placeholder,
        help=option.help + suffix,
    )
