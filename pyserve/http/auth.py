"""API keys from a file: who may ask, with what share and what limits.

The file is TOML (``[[keys]]`` tables) or JSON (``{"keys": [...]}``) and holds no key, only its SHA-256::

    [[keys]]
    name = "alice"
    sha256 = "5e88…"          # printf %s "$KEY" | sha256sum
    weight = 2.0              # share of a busy server, relative to the other keys
    tokens_per_minute = 60000 # prompt and output tokens; absent: no limit
    max_concurrent = 8        # requests at once; absent: no limit
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pyserve.errors import PyserveError
from pyserve.http.errors import Unauthorized


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key's owner. ``sha256`` is the hex digest of the key itself."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
    weight: Annotated[float, Meta(gt=0)] = 1.0
    tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None

    def cache_salt(self, extra: str | None) -> int:
        """What keeps this key's prefix-cache entries apart from other keys' (63 bits; 0 without keys).

        ``extra`` is the client's own ``cache_salt``, which divides further.
        """
        if not self.sha256.strip("0") and extra is None:
            return 0
        digest = hashlib.sha256(b"pyserve-cache-salt\0" + bytes.fromhex(self.sha256))
        if extra is not None:
            digest.update(extra.encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest()[:8], "big") >> 1


ANONYMOUS = ApiKey(name="anonymous", sha256="0" * 64)
"""Everybody, where there are no keys."""


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


class KeyRing:
    """The keys that are known; an empty ring lets everybody in as :data:`ANONYMOUS`."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        names = [key.name for key in keys]
        if len(set(names)) != len(names):
            raise PyserveError("API key names must be unique")
        self.keys = tuple(keys)
        self._digests = [bytes.fromhex(key.sha256) for key in keys]

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Reads a key file; raises :class:`~pyserve.errors.PyserveError` that says what is wrong with it."""
        try:
            text = path.read_text("utf-8")
            raw = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
            parsed = msgspec.convert(raw, _KeyFile)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise PyserveError(f"API key file {path}: {error}") from None
        if not parsed.keys:
            raise PyserveError(f"API key file {path} holds no key")
        return cls(parsed.keys)

    def named(self, name: str) -> ApiKey:
        """The key of that name; :data:`ANONYMOUS` where there is none (any more)."""
        return next((key for key in self.keys if key.name == name), ANONYMOUS)

    def authenticate(self, authorization: str) -> ApiKey:
        """The owner of the key in an ``Authorization`` header; raises :class:`Unauthorized`.

        Every known key is compared, each in constant time, so the time taken tells nothing.
        """
        if not self.keys:
            return ANONYMOUS
        scheme, _, secret = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("an API key is needed: Authorization: Bearer <key>")
        digest = hashlib.sha256(secret.strip().encode("latin-1", "replace")).digest()
        found: ApiKey | None = None
        for key, known in zip(self.keys, self._digests, strict=True):
            if hmac.compare_digest(digest, known):
                found = key
        if found is None:
            raise Unauthorized("the API key is not known")
        return found
