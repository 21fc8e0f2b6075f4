"""What the HTTP server may be told; the same names as flags, environment and file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Limits and time-outs of the wire. Sizes in bytes, times in seconds.

    ``host`` beyond loopback is refused without API keys unless ``allow_remote``. ``header_timeout_s``
    bounds a request's head from its first byte to its last, ``body_timeout_s`` its body; ``keep_alive_s`` an
    idle connection. ``write_timeout_s``: a client that accepts no byte for so long is cut off and its
    request cancelled. ``drain_timeout_s``: how long running requests may go on after shutdown was asked for,
    and ``close_timeout_s`` how long their last bytes may take after that. ``max_prompts`` bounds a list of
    prompts (times ``n``) or embedding inputs. ``max_jobs``/``job_bytes``: what the in-memory job store
    keeps, the oldest finished go first; ``idempotency_*``: the same for remembered answers.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allow_remote: bool = False
    backlog: int = 1024
    max_connections: int = 4096
    body_limit: int = 8 * 2**20
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    keep_alive_s: float = 5.0
    write_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    close_timeout_s: float = 2.0
    max_prompts: int = 256
    max_jobs: int = 4096
    job_bytes: int = 256 * 2**20
    job_ttl_s: float = 3600.0
    idempotency_entries: int = 4096
    idempotency_bytes: int = 64 * 2**20
    idempotency_ttl_s: float = 3600.0
