"""How a checkpoint on the hub is named; apart from the hub's client, which takes long to import."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REFERENCE = re.compile(
    r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True)
class HubReference:
    """ "owner/name", "owner/name@revision" or "owner/name/file.gguf"."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return (
            self.repo
            + (f"/{self.file}" if self.file else "")
            + (f"@{self.revision}" if self.revision else "")
        )


def parse_reference(text: str) -> HubReference | None:
    """What ``text`` means as a hub id; None where it cannot be one."""
    found = _REFERENCE.fullmatch(text)
    return HubReference(found["repo"], found["file"], found["revision"]) if found else None
