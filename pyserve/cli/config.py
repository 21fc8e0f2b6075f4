"""``pyserve config``: the effective configuration, with the source of each value."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pyserve.cli.options import SectionedCommand, configuration_from, settings_options
from pyserve.config import OPTIONS, Configuration


@click.command(cls=SectionedCommand)
@settings_options()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--toml", "as_toml", is_flag=True, help="Print a TOML file that --config takes.")
def config(config_file: Path | None, as_json: bool, as_toml: bool, **flags: object) -> None:
    """Print the effective configuration and where each value comes from.

    Takes the same options as serve. A flag wins over PYSERVE_* in the environment, that over the TOML
    file, that over the default.
    """
    configuration = configuration_from(config_file, flags)
    if as_json:
        click.echo(json.dumps(_plain(configuration), indent=2))
    elif as_toml:
        click.echo(to_toml(configuration), nl=False)
    else:
        Console().print(_table(configuration))


def to_toml(configuration: Configuration) -> str:
    """A TOML file that gives the same settings; what is left to be found out is a comment."""
    lines = []
    for option in OPTIONS:
        value = getattr(configuration.settings, option.name)
        text = json.dumps(
            str(value) if isinstance(value, Path) else value
        )  # JSON's scalars are TOML's
        lines.append(f"# {option.name} = auto" if value is None else f"{option.name} = {text}")
    return "\n".join(lines) + "\n"


def _table(configuration: Configuration) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("option", "value", "from"):
        table.add_column(heading, overflow="fold")
    for option in OPTIONS:
        source = configuration.sources[option.name]
        shown = option.kind.show(getattr(configuration.settings, option.name))
        table.add_row(option.name, shown, source, style="dim" if source == "default" else None)
    return table


def _plain(configuration: Configuration) -> dict[str, dict[str, object]]:
    return {
        option.name: {
            "value": str(value) if isinstance(value, Path) else value,
            "from": configuration.sources[option.name],
        }
        for option in OPTIONS
        for value in (getattr(configuration.settings, option.name),)
    }
