"""The ``pyserve`` command: one module a sub-command, imported when it is called."""

from pyserve.cli.main import main

__all__ = ["main"]
