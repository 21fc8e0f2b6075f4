"""Options: one table, four places to set them, and errors that name the key and the place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyserve.config import OPTIONS, ConfigError, Settings, load_configuration
from pyserve.config_values import format_size, size


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def test_defaults_are_the_settings_own() -> None:
    configuration = load_configuration(environ={})
    assert configuration.settings == Settings()
    assert set(configuration.sources.values()) == {"default"}


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("port = 1\nblock_size = 2\nmax_batch_tokens = 300\n")
    environ = {"PYSERVE_PORT": "10", "PYSERVE_BLOCK_SIZE": "20"}
    configuration = load_configuration({"port": 100, "host": None}, environ=environ, file=file)
    settings = configuration.settings
    assert (settings.port, settings.block_size, settings.max_batch_tokens) == (100, 20, 300)
    assert settings.host == "127.0.0.1"
    assert configuration.sources["port"] == "flag --port"
    assert configuration.sources["block_size"] == "environment PYSERVE_BLOCK_SIZE"
    assert configuration.sources["max_batch_tokens"] == f"file {file}"
    assert configuration.sources["host"] == "default"


def test_file_is_found_in_the_folder_before_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "xdg" / "pyserve" / "pyserve.toml"
    own.parent.mkdir(parents=True)
    own.write_text("port = 1")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert load_configuration(environ=environ).settings.port == 1
    Path("pyserve.toml").write_text("port = 2")
    assert load_configuration(environ=environ).settings.port == 2
    Path("named.toml").write_text("port = 3")
    named = {**environ, "PYSERVE_CONFIG": "named.toml"}
    assert load_configuration(environ=named).settings.port == 3


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_default_survives_being_shown_and_read_again(option) -> None:
    shown = option.kind.show(option.default)
    read = load_configuration(environ={option.env: shown})
    assert getattr(read.settings, option.name) == option.default
    assert read.sources[option.name] == f"environment {option.env}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "http", "an integer"),
        ("port", "65536", "at most 65535"),
        ("port", True, "an integer"),
        ("max_batch_tokens", 0, "at least 1"),
        ("prefix_cache", "maybe", "true or false"),
        ("dtype", "int3", "auto, float32, bfloat16"),
        ("kv_dtype", "int4", "auto, float32, bfloat16, int8"),
        ("kv_memory", "many", "2GiB"),
        ("kv_memory", "0", "2GiB"),
        ("window_max_ms", "nan", "a number"),
        ("ageing_s", 0, "above 0"),
        ("host", "", "text"),
    ],
)
def test_bad_value_names_key_place_and_what_was_expected(name, value, expected) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \(flag --.*expected.*{expected}"):
        load_configuration({name: value}, environ={})


def test_unknown_key_in_file_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("max-batch-token = 5")
    with pytest.raises(ConfigError, match=r"typo\.toml: unknown key 'max-batch-token'.*max_batch_"):
        load_configuration(environ={}, file=file)


@pytest.mark.parametrize("content", [b"port = ", b"\xff"])
def test_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_configuration(environ={}, file=file)


def test_missing_file_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_configuration(environ={}, file=tmp_path / "none.toml")


def test_unknown_environment_is_reported_not_refused() -> None:
    environ = {"PYSERVE_SERVICE_HOST": "10.0.0.1", "PYSERVE_ISA": "avx2", "PYSERVEX": "1"}
    assert load_configuration(environ=environ).unknown_env == ("PYSERVE_SERVICE_HOST",)


def test_values_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="window_min_ms"):
        load_configuration({"window_min_ms": 6}, environ={})
    with pytest.raises(ConfigError, match="max_batch_requests"):
        load_configuration({"max_batch_tokens": 32}, environ={})


@given(st.integers(min_value=1, max_value=1 << 50), st.sampled_from(["", "B", "KiB", "MB", "g"]))
def test_sizes_are_exact_in_bytes(count: int, unit: str) -> None:
    scale = {"": 1, "B": 1, "KiB": 1024, "MB": 10**6, "g": 1 << 30}[unit]
    if count * scale < 1 << 53:
        assert size().parse(f"{count}{unit}") == count * scale


def test_sizes_are_shown_short() -> None:
    assert [format_size(n) for n in (12, 1024, 3 << 29, 2 << 30)] == [
        "12B", "1KiB", "1.5GiB", "2GiB",
    ]  # fmt: skip


def test_settings_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1
