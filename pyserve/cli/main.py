"""The command group. Sub-commands load late, so that ``--help`` does not wait for torch."""

from __future__ import annotations

import importlib
import sys

import click

from pyserve import __version__
from pyserve.config import ConfigError
from pyserve.errors import PyserveError

# Sub-command -> (module of this package, its attribute, the line in --help).
COMMANDS = {
    "serve": ("serve", "serve", "Serve a model over HTTP."),
    "chat": ("chat", "chat", "Talk to a running server in the terminal."),
    "complete": ("complete", "complete", "Continue a text with a running server."),
    "models": ("models", "models", "List, fetch and inspect checkpoints."),
    "config": ("config", "config", "Print the effective configuration and where it comes from."),
    "bench": ("bench", "bench", "Measure a running server."),
    "version": ("version", "version", "Print what this build is made of."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"pyserve.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without an import."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[2]) for name, row in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pyserve")
def pyserve() -> None:
    """An LLM inference server: continuous batching, batch-invariant results.

    \b
    pyserve serve        starts one with a small default model
    pyserve chat         talks to it
    """


def main() -> None:
    """Run the command line; exit with 2 for a configuration that cannot be used, 1 for other failures."""
    try:
        pyserve(prog_name="pyserve")
    except ConfigError as error:
        sys.exit(_fail(error, 2))
    except (PyserveError, ImportError) as error:
        sys.exit(_fail(error, 1))


def _fail(error: Exception, code: int) -> int:
    click.echo(f"Error: {error}", err=True)
    return code
