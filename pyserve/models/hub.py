"""Checkpoints from the hub, through huggingface_hub: its cache, its token, its offline switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pyserve.errors import ModelError
from pyserve.models.architectures import find_huggingface
from pyserve.models.hub_reference import HubReference
from pyserve.models.safetensors_dir import INDEX, read_config

ALLOWED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    INDEX,
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""What a checkpoint needs; repositories hold a lot more (other frameworks' copies of the weights, logs)."""


def fetch_from_hub(reference: HubReference) -> Path:
    """The directory (or, where a file was named, the GGUF file) in the hub's cache, downloaded where absent.

    The architecture is checked before any weights are fetched. Raises ModelError for whatever is not there,
    not allowed, not supported, or cannot be reached.
    """
    repo, revision = reference.repo, reference.revision
    if reference.file is not None:
        file = reference.file
        return Path(_asking(reference, lambda: hf_hub_download(repo, file, revision=revision)))
    config = Path(
        _asking(reference, lambda: hf_hub_download(repo, "config.json", revision=revision))
    )
    find_huggingface(read_config(config.parent).text("model_type"), str(reference))
    return Path(
        _asking(
            reference,
            lambda: snapshot_download(repo, revision=revision, allow_patterns=list(ALLOWED)),
        )
    )


def _asking(reference: HubReference, fetch: Callable[[], str]) -> str:
    """Runs ``fetch`` with the hub's errors put in terms of what the user can do."""
    try:
        return fetch()
    except GatedRepoError as error:
        raise ModelError(
            f"{reference} asks for its licence to be accepted on huggingface.co, and for a token of the"
            " account that did: hf auth login, or HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{reference.repo} has no revision {reference.revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{reference} is no file or directory here and no model on the hub (a private one needs HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:  # before its base class EntryNotFoundError
        raise ModelError(
            f"{reference} is not in the local cache, and the hub cannot be reached (HF_HUB_OFFLINE set, or no"
            " connection). Download it once while online: pyserve models pull " + str(reference)
        ) from error
    except EntryNotFoundError as error:
        raise ModelError(
            f"{reference} has no {reference.file or 'config.json'} on the hub; of a repository of GGUF files,"
            " name one: owner/name/file.gguf"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{reference} could not be fetched from the hub: {error}") from error
