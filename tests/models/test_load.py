"""What ``--model`` may be, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyserve.errors import ModelError
from pyserve.models import hub
from pyserve.models.hub import ALLOWED
from pyserve.models.hub_reference import HubReference, parse_reference
from pyserve.models.load import open_checkpoint
from tests.model.harness import random_model
from tests.models.gguf_writing import write_model


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_model(tmp_path / "small-model.gguf", random_model("llama"), "llama")
    assert open_checkpoint(str(tmp_path)).name == "small-model"
    write_model(tmp_path / "other.gguf", random_model("llama"), "llama")
    with pytest.raises(ModelError, match=r"name one: other\.gguf, small-model\.gguf"):
        open_checkpoint(str(tmp_path))


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(name: str, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    for ref in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match="pickled weights are refused"):
            open_checkpoint(str(ref))


def test_a_lone_safetensors_file_asks_for_its_directory(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="name the directory"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="is the download complete"):
        open_checkpoint(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"incomplete: {shard.name} missing"):
        open_checkpoint(str(tmp_path))


def test_an_index_cannot_point_outside(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match="outside its directory"):
        open_checkpoint(str(tmp_path))


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        open_checkpoint(str(tmp_path))


def test_unsupported_gguf_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", random_model("llama"), "mamba")
    with pytest.raises(ModelError, match=r"'mamba' is not supported. Supported are: Llama"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("ref", ["./absent", "/absent/model", "~/absent", "absent.gguf", "a/b/c/d"])
def test_an_absent_path_is_not_taken_to_the_hub(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(ref)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("gpt2", HubReference("gpt2")),
        ("owner/name-1.5_b", HubReference("owner/name-1.5_b")),
        ("owner/name@main", HubReference("owner/name", revision="main")),
        ("o/n/sub/m.Q4_K.gguf", HubReference("o/n", file="sub/m.Q4_K.gguf")),
        ("o/n/m.gguf@refs/pr/1", HubReference("o/n", file="m.gguf", revision="refs/pr/1")),
        ("a b", None),
        ("", None),
    ],
)
def test_hub_references(text: str, reference: HubReference | None) -> None:
    assert parse_reference(text) == reference
    assert reference is None or str(reference) == text


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for a repository's snapshot."""
    random_model("qwen2").save_pretrained(tmp_path)

    def download(repo: str, name: str, *, revision: str | None) -> str:
        assert (repo, revision) == ("owner/name", "v1")
        return str(tmp_path / name)

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo, revision, allow_patterns) == ("owner/name", "v1", list(ALLOWED))
        return str(tmp_path)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return tmp_path


def test_a_hub_id_is_downloaded_and_named_after_its_repository(on_hub: Path) -> None:
    checkpoint = open_checkpoint("owner/name@v1")
    assert checkpoint.name == "owner/name"
    assert checkpoint.architecture == "qwen2"


def test_a_gguf_file_on_the_hub_is_downloaded_alone(on_hub: Path) -> None:
    write_model(on_hub / "m.gguf", random_model("llama"), "llama")
    assert open_checkpoint("owner/name/m.gguf@v1").name == "m"


def test_an_unsupported_architecture_is_refused_before_its_weights_come(
    on_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (on_hub / "config.json").write_text('{"model_type": "mamba"}')
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        open_checkpoint("owner/name@v1")


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedRepoError("x", response=_response(403)), "licence"),
        (lambda: RepositoryNotFoundError("x", response=_response(404)), "no model on the hub"),
        (lambda: RevisionNotFoundError("x", response=_response(404)), "no revision"),
        (lambda: LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE"),
        (lambda: EntryNotFoundError("x"), r"owner/name/file\.gguf"),
        (lambda: OSError("disk full"), "disk full"),
    ],
)
def test_hub_errors_say_what_to_do(
    make: Callable[[], Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise make()

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(ModelError, match=message):
        open_checkpoint("owner/name")


@pytest.fixture(scope="module")
def llama_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.freq_base": 1e4}
    return write_model(path, random_model("llama"), "llama", metadata=metadata).read_bytes()


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_header_never_does_worse_than_a_model_error(
    llama_bytes: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(llama_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(24, 1200))  # the metadata and the first tensors' headers
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        for _ in open_checkpoint(str(path)).tensors():
            pass
    except ModelError:
        pass


@pytest.mark.parametrize("key", ["block_count", "attention.key_length", "attention.head_count"])
@pytest.mark.parametrize("value", [0, 1 << 30, (1 << 32) - 1])
def test_absurd_sizes_are_refused(key: str, value: int, tmp_path: Path) -> None:
    model = random_model("llama")
    path = tmp_path / "m.gguf"
    name = f"llama.{key}".encode()
    content = write_model(path, model, "llama").read_bytes()
    at = content.index(name) + len(name) + 4  # the value follows the key and the value's type
    path.write_bytes(content[:at] + value.to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelError):
        open_checkpoint(str(path))
