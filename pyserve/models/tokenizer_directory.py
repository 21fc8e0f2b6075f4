"""A tokenizer from a Hugging Face directory: ``tokenizer.json`` and the small files around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pyserve.errors import ModelError
from pyserve.models.tokenizer import TokenizerParts
from pyserve.models.vocabulary import BytesOf, byte_level_bytes, plain_bytes, sentencepiece_bytes

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_directory(path: Path) -> TokenizerParts:
    """What the directory says of its tokenizer. Raises ModelError where it cannot be used."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{path} has no tokenizer.json. Make one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{file} cannot be read: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    special_map = _read_json(path / "special_tokens_map.json")
    named = _named_tokens(config, special_map)
    _add_missing(backend, config, special_map, named)
    bytes_of, strips_space = _spelling(json.loads(backend.to_str())["decoder"], file)
    bos, eos = (
        backend.token_to_id(named[key]) if key in named else None
        for key in ("bos_token", "eos_token")
    )
    prefix, suffix = _surroundings(backend, config, bos, eos)
    return TokenizerParts(
        backend=backend,
        bytes_of=bytes_of,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_space=strips_space,
        bos_token_id=bos,
        eos_token_ids=_ends(path, eos),
        named=named,
        chat_template=_chat_template(path, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """A special token's text: a string, or an object with ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    merged = {**special_map, **config}
    return {name: text for name in _NAMED if (text := _content(merged.get(name))) is not None}


def _add_missing(
    backend: Backend,
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    named: Mapping[str, str],
) -> None:
    """Tokens that only the configuration declares, or declares special, as transformers reads it."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder", {})
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in added:
            flags = {flag: token[flag] for flag in _FLAGS if flag in token}
            added[token["content"]] = AddedToken(token["content"], **flags)
            backend.add_tokens([added[token["content"]]])
    lists = (source.get("additional_special_tokens") or () for source in (special_map, config))
    extra = (text for tokens in lists for token in tokens if (text := _content(token)) is not None)
    for text in dict.fromkeys([*named.values(), *extra]):
        token = added.get(text)
        if token is None:
            backend.add_tokens([AddedToken(text, special=True, normalized=False)])
        elif not token.special:
            flags = {flag: getattr(token, flag) for flag in _FLAGS} | {"special": True}
            backend.add_special_tokens([AddedToken(text, **flags)])


def _spelling(decoder: Any, file: Path) -> tuple[BytesOf, bool]:
    """How tokens spell bytes, and whether decoding strips a leading space, from the decoder's JSON."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, Mapping) else []
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    strips = any(
        step["type"] == "Strip" and step["content"] == " " and step["start"] for step in steps
    )
    if "Metaspace" in kinds:
        scheme = next(
            step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace"
        )
        return sentencepiece_bytes, strips or scheme != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return sentencepiece_bytes, strips
    if set(kinds) <= {"Fuse"}:
        return plain_bytes, False
    raise ModelError(f"{file}: decoding with {', '.join(kinds)} is not supported.")


def _surroundings(
    backend: Backend, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that ``add_special_tokens`` puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    before = next((n for n in range(len(full) + 1) if full[n : n + len(bare)] == bare), 0)
    prefix, suffix = tuple(full[:before]), tuple(full[before + len(bare) :])
    if (wanted := config.get("add_bos_token")) is not None and bos is not None:
        prefix = (bos,) if wanted else ()
    if (wanted := config.get("add_eos_token")) is not None and eos is not None:
        suffix = (eos,) if wanted else ()
    return prefix, suffix


def _ends(path: Path, eos: int | None) -> tuple[int, ...]:
    """Every id that ends a text: the tokenizer's, and what the generation settings add."""
    ends: list[Any] = [eos]
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(id_ for id_ in ends if isinstance(id_, int)))


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: ``chat_template.jinja``, ``chat_template.json``, or the configuration's."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get(
        "chat_template", config.get("chat_template")
    )
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
