"""``pyserve models``: what is on this machine, fetch more, and look inside before serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pyserve.config_values import format_size


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint on this machine; ``name`` is what ``--model`` takes."""

    name: str
    size_bytes: int
    path: Path


@click.group()
def models() -> None:
    """List, fetch and inspect checkpoints."""


@models.command("list")
def list_command() -> None:
    """List the checkpoints on this machine: the default one, and those in the hub's cache."""
    found = sorted(stored_models(), key=lambda model: model.name)
    if not found:
        click.echo('no checkpoint here yet; "pyserve models pull" fetches the default one')
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("path", overflow="fold")
    for model in found:
        table.add_row(model.name, format_size(model.size_bytes), str(model.path))
    Console().print(table)


@models.command()
@click.argument("model", required=False)
def pull(model: str | None) -> None:
    """Fetch MODEL (a hub id; default: the default model), so that it can be served offline."""
    from pyserve.models.load import open_checkpoint

    checkpoint = open_checkpoint(model)
    click.echo(f"{checkpoint.name}  {checkpoint.path}")


@models.command()
@click.argument("model", required=False)
def inspect(model: str | None) -> None:
    """Show what MODEL is and the memory that it will take. Reads headers only, not the weights."""
    from pyserve.backends.native import (
        ELEMENT_SIZES,
        KEPT_QUANTIZED,
        KV_SIZES,
        QUANTIZE,
        default_dtype,
        default_kv_dtype,
        kv_bytes_per_token,
    )
    from pyserve.models.checkpoint import NOTHING
    from pyserve.models.load import open_checkpoint

    checkpoint = open_checkpoint(model)
    config, stored = checkpoint.config, checkpoint.stored
    windows = sorted({window for window in config.layer_window if window})
    rows = [
        ("name", checkpoint.name),
        ("path", str(checkpoint.path)),
        ("architecture", checkpoint.architecture),
        ("parameters", f"{stored.num_parameters / 1e6:.1f} M"),
        ("stored as", f"{stored.dtype}, {format_size(stored.num_bytes)}"),
        ("context", f"{config.context_length} tokens"),
        (
            "layers",
            f"{config.num_layers}, hidden {config.hidden_size}, MLP {config.intermediate_size}",
        ),
        (
            "attention",
            f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} of keys and values",
        ),
        ("vocabulary", f"{config.vocab_size}{', tied' if config.tie_embeddings else ''}"),
    ]
    if windows:
        rows.append(("window", ", ".join(map(str, windows)) + " tokens in some layers"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    native = default_dtype(checkpoint.quantization)
    for label, dtype, keep in (
        ("as served", native, KEPT_QUANTIZED),
        ("--quantize int8", native, QUANTIZE["int8"]),
        *((f"in {dtype}", dtype, NOTHING) for dtype in ELEMENT_SIZES),
    ):
        size = checkpoint.weight_bytes(ELEMENT_SIZES[dtype], keep)
        table.add_row(label, f"weights {format_size(size)}")
    for dtype in KV_SIZES:
        per_token = kv_bytes_per_token(config, dtype)
        default = " (as served)" if dtype == default_kv_dtype(None) else ""
        table.add_row(
            f"KV in {dtype}",
            f"{format_size(per_token)} a token,"
            f" {format_size(per_token * config.context_length)} a full context{default}",
        )
    Console().print(table)


def stored_models() -> Iterator[Stored]:
    """Checkpoints in our cache and in the hub's."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from pyserve.models.default import DEFAULT_MODEL

    if DEFAULT_MODEL.path.is_file():
        size_bytes = DEFAULT_MODEL.path.stat().st_size
        yield Stored(DEFAULT_MODEL.name, size_bytes, DEFAULT_MODEL.path)
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type != "model":
            continue
        if "config.json" in names:
            yield Stored(repo.repo_id, repo.size_on_disk, repo.repo_path)
        for name in sorted(name for name in names if name.endswith(".gguf")):
            yield Stored(f"{repo.repo_id}/{name}", repo.size_on_disk, repo.repo_path)
