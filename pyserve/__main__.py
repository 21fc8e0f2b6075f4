"""``python -m pyserve``: the same as the ``pyserve`` command."""

from pyserve.cli import main

main()
