"""Typed reads from a checkpoint's own description (config.json, GGUF metadata); errors name the key."""

from __future__ import annotations

from collections.abc import Mapping

from pyserve.errors import ModelError


class Fields:
    """A mapping from outside, read with types. ``null`` counts as absent.

    ``where`` is the file that errors name; ``prefix`` goes before every key ("llama." in GGUF). Every getter
    raises ModelError where the value has another type, or is absent and there is no default.
    """

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._values = values
        self.where = where
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(self.prefix + key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there, spelled out as null."""
        return self.prefix + key in self._values and not self.has(key)

    def raw(self, key: str, default: object = None) -> object:
        """The value as it is."""
        value = self._values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        """An integer from 0 to ``maximum``; a list of equal ones (GGUF: one per layer) counts as one."""
        value = self._get(key, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise ModelError(f"{self._name(key)} differs between layers; not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if not 0 <= value <= maximum:
            raise self._wrong(key, f"at most {maximum} and not negative", value)
        return value

    def num_layers(self, key: str, default: int | None = None) -> int:
        """A number of layers: a bound keeps a damaged file from asking for gigabytes of names."""
        return self.integer(key, default, maximum=4096)

    def head_dim(self, key: str, default: int | None = None) -> int:
        """A size of a head, bounded likewise."""
        return self.integer(key, default, maximum=65536)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite or infinite number, as float."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def mapping(self, key: str) -> Mapping[str, object] | None:
        """An object, or None where the key is absent."""
        value = self._values.get(self.prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the key is absent."""
        value = self._values.get(self.prefix + key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where the key is absent."""
        value = self._values.get(self.prefix + key)
        if value is None:
            return ()
        items: list[object] = value if isinstance(value, list) else [value]
        ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) != len(items):
            raise self._wrong(key, "a token id or a list of them", value)
        return tuple(item for item in ids if item >= 0)

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(self.prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._name(key)} is missing")
        return value

    def _name(self, key: str) -> str:
        return f"{self.where}: {self.prefix}{key}"

    def _wrong(self, key: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self._name(key)} should be {wanted}, not {value!r:.80}")
