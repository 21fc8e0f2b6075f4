"""``pyserve complete``: continue a text; the answer is all that goes to standard output."""

from __future__ import annotations

import sys

import click

from pyserve.cli.client import Client
from pyserve.cli.options import client_options
from pyserve.cli.sampling import given, sampling_options


@click.command()
@click.argument("prompt", required=False)
@client_options
@sampling_options
@click.option("--stop", multiple=True, help="Text to stop before; may be given several times.")
def complete(
    prompt: str | None, url: str, api_key: str | None, stop: tuple[str, ...], **sampling: object
) -> None:
    """Continue PROMPT, or what comes on standard input, as the tokens arrive."""
    text = prompt if prompt is not None else sys.stdin.read()
    if not text:
        raise click.UsageError("no prompt: give one, or pipe it to standard input")
    body: dict[str, object] = {"prompt": text, **given(sampling)}
    if stop:
        body["stop"] = list(stop)
    with Client(url, api_key) as client:
        body["model"] = client.model()["id"]
        for event in client.stream("/v1/completions", body):
            for choice in event["choices"]:
                sys.stdout.write(choice["text"])
                sys.stdout.flush()
    click.echo()
