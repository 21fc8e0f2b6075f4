"""The commands that need no server, as a user types them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyserve import __version__
from pyserve.cli.main import COMMANDS, main, pyserve
from pyserve.config import OPTIONS


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(pyserve, list(arguments), catch_exceptions=False)


def test_help_lists_every_command() -> None:
    output = run("--help").output
    assert all(f"  {name} " in output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: pyserve {name}")


def test_unknown_command_is_named() -> None:
    result = run("server")
    assert result.exit_code == 2
    assert "server" in result.output


def test_serve_and_config_take_every_option() -> None:
    for command in ("serve", "config"):
        output = run(command, "--help").output
        assert all(option.flag in output for option in OPTIONS)


def test_config_tells_values_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSERVE_BLOCK_SIZE", "32")
    printed = json.loads(run("config", "--json", "--port", "9", "--no-prefix-cache").output)
    assert printed["port"] == {"value": 9, "from": "flag --port"}
    assert printed["block_size"] == {"value": 32, "from": "environment PYSERVE_BLOCK_SIZE"}
    assert printed["prefix_cache"] == {"value": False, "from": "flag --prefix-cache"}
    assert printed["host"] == {"value": "127.0.0.1", "from": "default"}


def test_config_prints_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    given = ("--kv-memory", "1GiB", "--ageing-s", "2.5", "--host", '"', "--allow-remote")
    file = tmp_path / "printed.toml"
    file.write_text(run("config", "--toml", *given).output)
    assert tomllib.loads(file.read_text())["kv_memory"] == 1 << 30
    assert run("config", "--toml", "--config", str(file)).output == file.read_text()


def test_config_warns_of_a_variable_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSERVE_MAX_BATCH", "1")
    assert "PYSERVE_MAX_BATCH is not an option" in run("config").stderr


def test_bad_configuration_ends_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pyserve", "config", "--port", "http"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("Error: port (flag --port): expected")


def test_version_names_the_parts() -> None:
    output = run("version").output
    assert __version__ in output
    assert "built for torch 2." in output


def test_models_list_without_any_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSERVE_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", tmp_path / "hub")
    assert "pyserve models pull" in run("models", "list").output


def test_models_inspect_shows_shape_and_memory_without_reading_weights(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    output = run("models", "inspect", str(tmp_path / "tiny")).output
    for expected in ("llama", "F32", "128 tokens", "4 heads of 8, 2 of keys", "256B a token"):
        assert expected in output
    assert "as served" in output
    assert "--quantize int8" in output


def test_models_inspect_of_nothing_says_what_is_wrong() -> None:
    result = CliRunner().invoke(pyserve, ["models", "inspect", "./none.gguf"])
    assert "does not exist" in str(result.exception)
