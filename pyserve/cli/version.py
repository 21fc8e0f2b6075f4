"""``pyserve version``: the package, the extension, and what they run on."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from pyserve import __version__
from pyserve.extension import build_info


@click.command()
def version() -> None:
    """Print the versions of pyserve, its extension, torch and Python."""
    click.echo(f"pyserve   {__version__}")
    try:
        built = build_info()
        cuda = f"CUDA {built.cuda}" if built.cuda else "no CUDA"
        click.echo(f"extension built for torch {built.torch}, {cuda}")
    except ImportError as error:
        click.echo(f"extension {error}")
    click.echo(f"torch     {metadata.version('torch')}")
    click.echo(f"Python    {platform.python_version()} on {platform.system()} {platform.machine()}")
