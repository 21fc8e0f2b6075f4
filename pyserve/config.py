"""One typed configuration: the same names as flags, ``PYSERVE_*`` environment and keys of a TOML file.

:class:`Settings` is the table: each field is one option with its type, default and help. A flag wins over
the environment, that over the file, that over the default; every value remembers where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyserve.config_values import Kind, flag, natural, number, one_of, path, size, text
from pyserve.errors import PyserveError

ENV_PREFIX = "PYSERVE_"
# Read elsewhere: the build, the kernels, the clients, this file.
OTHER_ENV = {"CUDA", "ISA", "CONFIG", "URL", "API_KEY", "CACHE", "CACHE_DIR"}


class ConfigError(PyserveError):
    """A value that cannot be used; the message names the key and where it was set."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table, as the command line and the documents need it."""

    name: str
    kind: Kind[Any]
    default: Any
    help: str
    section: str

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")


def _section(section: str) -> Callable[[Kind[Any], Any, str], Any]:
    """What declares a field of :class:`Settings` that the help lists under ``section``."""
    return lambda kind, default, text: field(
        default=default, metadata={"kind": kind, "help": text, "section": section}
    )


_model, _memory, _scheduling = _section("Model"), _section("Memory"), _section("Scheduling")
_http, _logs = _section("HTTP"), _section("Logs")


@dataclass(frozen=True)
class Settings:
    """Every option of the server. ``_s`` is seconds, ``_ms`` milliseconds; sizes are bytes."""

    model: str | None = _model(
        text(optional=True),
        None,
        "Checkpoint: a directory, a .gguf file or a hub id. Default: SmolLM2-135M-Instruct.",
    )
    backend: str = _model(one_of("native", "transformers"), "native", "What runs the forward pass.")
    device: str = _model(
        one_of("auto", "cpu", "cuda"),
        "auto",
        "Where the forward pass runs. auto: cuda where there is a device and the extension was built for it,"
        " else cpu.",
    )
    dtype: str = _model(
        one_of("auto", "float32", "bfloat16"),
        "auto",
        "Compute type of all weights. auto: quantised ones stay so; others become bfloat16 where they"
        " are stored so or the processor has it, else float32.",
    )
    kv_dtype: str = _model(
        one_of("auto", "float32", "bfloat16", "int8"),
        "auto",
        "How keys and values are stored, by the native back-end. auto: as --dtype says; bfloat16 where that"
        " is auto too.",
    )
    quantize: str = _model(
        one_of("none", "int8"),
        "none",
        "What matrices in floating point become when loaded. int8: 8 bits, with a scale for each 32 of a row;"
        " dtype is that of the rest.",
    )
    context_length: int | None = _model(
        natural(optional=True),
        None,
        "Longest prompt and output together, in tokens. Default: the model's own.",
    )
    threads: int | None = _model(
        natural(optional=True), None, "Threads of the forward pass. Default: one a core."
    )

    kv_memory: int | None = _memory(
        size(optional=True), None, "KV cache, such as 2GiB. Default: from free memory."
    )
    block_size: int | None = _memory(
        natural(maximum=256, optional=True),
        None,
        "Tokens a KV block holds. Default: 16; 256, which its attention wants, on cuda.",
    )
    kv_prefault: bool = _memory(
        flag(),
        True,
        "Take the KV cache's memory in idle time after the start, so that no step waits for it; else as it is"
        " first used. On the CPU.",
    )
    prefix_cache: bool = _memory(flag(), True, "Reuse the KV blocks of prompts that begin alike.")

    max_batch_tokens: int = _scheduling(natural(), 512, "Tokens a step may process.")
    max_batch_requests: int = _scheduling(natural(), 64, "Sequences a step may advance.")
    max_prefill_ms: float = _scheduling(
        number(above=0), 100.0, "Time that prefill may add to a step."
    )
    max_waiting_requests: int = _scheduling(
        natural(), 1024, "Requests that may wait in line; more get 429."
    )
    max_waiting_tokens: int = _scheduling(
        natural(), 262144, "Prompt tokens that may wait in line; more get 429."
    )
    window_min_ms: float = _scheduling(
        number(minimum=0), 0.0, "Batch window: least an idle engine waits for company."
    )
    window_max_ms: float = _scheduling(
        number(minimum=0), 5.0, "Batch window: most an idle engine waits for company."
    )
    ageing_s: float = _scheduling(
        number(above=0), 10.0, "Waiting time that weighs as much as one step of priority."
    )

    host: str = _http(text(), "127.0.0.1", "Address to listen on.")
    port: int = _http(
        natural(minimum=0, maximum=65535), 8000, "Port to listen on; 0 takes a free one."
    )
    allow_remote: bool = _http(flag(), False, "Listen on other than loopback without API keys.")
    api_keys_file: Path | None = _http(
        path(optional=True),
        None,
        "TOML file of API keys: name, key hash, weight, limits. Default: none.",
    )
    body_limit: int = _http(size(), 8 << 20, "Longest request body.")
    body_timeout_s: float = _http(number(above=0), 30.0, "Time a client has to send its body.")
    write_timeout_s: float = _http(
        number(above=0), 30.0, "Time a client may stop reading before it is cut."
    )
    header_timeout_s: float = _http(
        number(above=0), 10.0, "Time a client has to send a request's head, once it has begun."
    )
    keep_alive_s: float = _http(number(above=0), 5.0, "Time an idle connection is kept.")
    max_connections: int = _http(natural(), 4096, "Connections at once; more get 503.")
    max_prompts: int = _http(
        natural(), 256, "Prompts (times n) or embedding inputs in one request."
    )
    max_jobs: int = _http(
        natural(), 4096, "Jobs that are kept; the oldest finished make room for new ones."
    )
    job_memory: int = _http(size(), 256 << 20, "Memory for jobs and their results.")
    job_ttl_s: float = _http(number(above=0), 3600.0, "Time a finished job is kept.")
    idempotency_ttl_s: float = _http(
        number(above=0), 3600.0, "Time that the answer to an Idempotency-Key is kept."
    )
    drain_timeout_s: float = _http(
        number(minimum=0), 30.0, "Time that running requests get after SIGTERM."
    )
    vllm_metrics: bool = _http(flag(), True, "Show metrics under vLLM's names too.")

    log_format: str = _logs(
        one_of("auto", "console", "json"), "auto", "auto: console on a terminal, else json."
    )
    log_level: str = _logs(
        one_of("debug", "info", "warning", "error"), "info", "Least severe level shown."
    )


OPTIONS: tuple[Option, ...] = tuple(
    Option(f.name, f.metadata["kind"], f.default, f.metadata["help"], f.metadata["section"])
    for f in dataclasses.fields(Settings)
)
_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Configuration:
    """The effective settings; ``sources[name]`` says where each value came from, in words.

    ``unknown_env`` lists ``PYSERVE_*`` variables that mean nothing: a warning, not an error, for others
    set such names too (Kubernetes does for a service called pyserve).
    """

    settings: Settings
    sources: Mapping[str, str]
    unknown_env: tuple[str, ...] = ()


def load_configuration(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Configuration:
    """Merge flags (None: not given), environment, TOML file and defaults.

    ``file`` is the one that ``--config`` names; else ``PYSERVE_CONFIG``, ``./pyserve.toml`` and
    ``$XDG_CONFIG_HOME/pyserve/pyserve.toml`` are tried. Raises :class:`ConfigError`.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = {option.name: "default" for option in OPTIONS}
    for source, given in (
        *_from_file(file, environ),
        *((f"environment {o.env}", {o.name: environ[o.env]}) for o in OPTIONS if o.env in environ),
        *((f"flag {_BY_NAME[k].flag}", {k: v}) for k, v in (flags or {}).items() if v is not None),
    ):
        for name, value in given.items():
            values[name] = _parse(_BY_NAME[name], value, source)
            sources[name] = source
    settings = Settings(**values)
    _check_together(settings, sources)
    return Configuration(settings, sources, _unknown_env(environ))


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The TOML file used when ``--config`` names none; None where there is none."""
    if named := environ.get(ENV_PREFIX + "CONFIG"):
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    candidates = (Path("pyserve.toml"), Path(base, "pyserve", "pyserve.toml"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _from_file(
    file: Path | None, environ: Mapping[str, str]
) -> list[tuple[str, Mapping[str, object]]]:
    file = file or config_file(environ)
    if file is None:
        return []
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    for key in content:
        if key not in _BY_NAME:
            raise ConfigError(f"{file}: unknown key '{key}'{_suggestion(key)}")
    return [(f"file {file}", content)]


def _parse(option: Option, value: object, source: str) -> Any:
    try:
        return option.kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"{option.name} ({source}): {error}, not {value!r}") from None


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), _BY_NAME, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _unknown_env(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {option.env for option in OPTIONS} | {ENV_PREFIX + name for name in OTHER_ENV}
    return tuple(sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known))


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    if settings.window_min_ms > settings.window_max_ms:
        raise ConfigError(
            f"window_min_ms ({sources['window_min_ms']}): {settings.window_min_ms} is over"
            f" window_max_ms ({settings.window_max_ms}, {sources['window_max_ms']})"
        )
    if settings.max_batch_requests > settings.max_batch_tokens:
        raise ConfigError(
            f"max_batch_requests ({sources['max_batch_requests']}): {settings.max_batch_requests}"
            f" sequences need a token each, but max_batch_tokens is {settings.max_batch_tokens}"
        )
