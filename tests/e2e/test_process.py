"""Start, signals and exit codes of the real process with the real model."""

from __future__ import annotations

import signal
import socket

import httpx

from tests.e2e.process import SMALL, Server, running, start


def stream_body(max_tokens: int) -> dict:
    return {
        "model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "temperature": 0,
        "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
    }  # fmt: skip


def stream_while(server: Server, body: dict, *signals: signal.Signals) -> list[str]:
    """Sends ``signals`` once a stream has its first event; returns the whole stream."""
    lines: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            lines.append(line.removeprefix("data:").strip())
            if len(lines) == 1:
                for number, logged in zip(signals, ("shutting down", "ending"), strict=False):
                    server.signal(number)
                    server.wait_for(logged)
    return lines


def test_signal_lets_a_running_stream_finish_and_exits_with_0() -> None:
    with running() as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        lines = stream_while(server, stream_body(24), signal.SIGTERM)
        assert lines[-1] == "[DONE]"
        assert server.wait() == 0
        assert server.lines[-1]["event"] == "stopped"
        ready = server.ready
        assert ready["model"] == "SmolLM2-135M-Instruct"
        assert ready["kv_blocks"] * 16 >= ready["context_length"] == 1024
        assert ready["kv_bytes"] <= 128 << 20


def test_second_signal_ends_at_once_and_exits_with_0() -> None:
    with running("--drain-timeout", "1000") as server:
        lines = stream_while(server, stream_body(900), signal.SIGINT, signal.SIGTERM)
        assert "error" in lines[-1]
        assert server.wait() == 0


def refused(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and message of a server that must not start."""
    process = start(*SMALL, *arguments, **environ)
    _, message = process.communicate(timeout=120)
    return process.returncode, message


def test_other_than_loopback_without_keys_is_refused() -> None:
    code, message = refused("--host", "0.0.0.0")
    assert code == 1
    assert "without API keys" in message


def test_port_in_use_is_one_line_and_not_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, message = refused("--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "cannot listen" in message
    assert "Traceback" not in message


def test_checkpoint_that_is_not_there_is_one_line() -> None:
    code, message = refused("--model", "./none.gguf")
    assert (code, message) == (1, "Error: ./none.gguf does not exist\n")


def test_bad_option_in_the_environment_exits_with_2() -> None:
    code, message = refused(PYSERVE_MAX_BATCH_TOKENS="lots")
    assert code == 2
    assert "PYSERVE_MAX_BATCH_TOKENS" in message
