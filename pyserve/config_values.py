"""The kinds of value an option can have: parsed alike from a flag, the environment and TOML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
_UNITS = {"": 1, "b": 1} | {
    name: base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for name, base in ((letter, 1024), (letter + "ib", 1024), (letter + "b", 1000))
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """``parse`` raises ValueError with what was expected; ``show`` gives the text that parses to a value."""

    placeholder: str
    parse: Callable[[object], T]
    show: Callable[[T], str] = str
    choices: tuple[str, ...] = ()
    is_flag: bool = False


def text(*, optional: bool = False) -> Kind[str | None]:
    """A string that is not empty."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("expected text")
        return value

    return Kind("TEXT", _optional(parse, optional), _show_optional(str))


def path(*, optional: bool = False) -> Kind[Path | None]:
    """A path; ``~`` is expanded."""

    def parse(value: object) -> Path:
        if not isinstance(value, str | Path) or not str(value).strip():
            raise ValueError("expected a path")
        return Path(value).expanduser()

    return Kind("PATH", _optional(parse, optional), _show_optional(str))


def one_of(*choices: str) -> Kind[str]:
    """One of a few words."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return str(value)

    return Kind("|".join(choices), parse, choices=choices)


def flag() -> Kind[bool]:
    """True or false; as text 1/0, true/false, yes/no, on/off."""

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, str) else ""
        if word not in _TRUE | _FALSE:
            raise ValueError("expected true or false")
        return word in _TRUE

    return Kind("", parse, lambda value: str(value).lower(), is_flag=True)


def natural(
    *, minimum: int = 1, maximum: int | None = None, optional: bool = False
) -> Kind[int | None]:
    """An integer in ``[minimum, maximum]``."""

    def parse(value: object) -> int:
        expected = f"an integer of at least {minimum}" + (f", at most {maximum}" if maximum else "")
        try:
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise ValueError
            parsed = int(value)
            if parsed < minimum or (maximum is not None and parsed > maximum):
                raise ValueError
        except ValueError:
            raise ValueError(f"expected {expected}") from None
        return parsed

    return Kind("N", _optional(parse, optional), _show_optional(str))


def number(*, minimum: float | None = None, above: float | None = None) -> Kind[float]:
    """A finite number, at least ``minimum`` or greater than ``above``."""

    def parse(value: object) -> float:
        bound = f"above {above:g}" if above is not None else f"of at least {minimum or 0:g}"
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            parsed = float(value)
            low = above is not None and parsed <= above
            if low or (minimum is not None and parsed < minimum) or not math.isfinite(parsed):
                raise ValueError
        except ValueError:
            raise ValueError(f"expected a number {bound}") from None
        return parsed

    return Kind("X", parse, lambda value: f"{value:g}")


def size(*, optional: bool = False) -> Kind[int | None]:
    """Bytes, at least one: an integer, or text with a unit (KiB = K = 1024, KB = 1000, and so on)."""

    def parse(value: object) -> int:
        match = _SIZE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
        unit = _UNITS.get(match[2].lower()) if match else None
        parsed = int(float(match[1]) * unit) if match and unit else 0
        if parsed < 1:
            raise ValueError("expected a size such as 512MiB or 2GiB")
        return parsed

    return Kind("SIZE", _optional(parse, optional), _show_optional(format_size))


def format_size(count: int) -> str:
    """Bytes with the largest binary unit that keeps the value exact or short: ``2GiB``, ``1.4GiB``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g}{unit}"
    return f"{count}B"


def _optional(parse: Callable[[object], T], optional: bool) -> Callable[[object], T | None]:
    def parse_optional(value: object) -> T | None:
        return None if optional and value == "auto" else parse(value)

    return parse_optional


def _show_optional(show: Callable[[T], str]) -> Callable[[T | None], str]:
    return lambda value: "auto" if value is None else show(value)
