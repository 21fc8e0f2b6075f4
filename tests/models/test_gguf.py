"""GGUF files: what is read, against the ``gguf`` package; what is refused, and that nothing crashes."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as reference_dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyserve.errors import ModelError
from pyserve.models.default import fetch_default
from pyserve.models.dequantize import FORMATS, dequantize
from pyserve.models.gguf import GGUFFile
from tests.models.gguf_blocks import random_blocks

QUANTISED = [kind for kind, fmt in FORMATS.items() if fmt.unpack is not None]
ROWS = 5


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
def test_quantised_blocks_are_read_exactly(kind: int) -> None:
    data = random_blocks(FORMATS[kind].name, 1000)
    expected = reference_dequantize(data, gguf.GGMLQuantizationType(kind))
    actual = dequantize(torch.from_numpy(data).flatten(), FORMATS[kind])
    assert actual.numpy().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_tensors_in_a_file_are_read_exactly(kind: int, tmp_path: Path) -> None:
    fmt, rng = FORMATS[kind], np.random.default_rng(1)
    width = 3 * fmt.block_size if fmt.unpack else 7
    values = rng.normal(size=(ROWS, width)).astype(np.float32)
    quantised_by_package = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")
    if fmt.name in quantised_by_package:
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind))
    else:
        data = random_blocks(FORMATS[kind].name, 3 * ROWS).reshape(ROWS, -1)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("padding", np.ones(3, dtype=np.float32))
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType(kind))
    finish(writer)
    actual = GGUFFile(path).load("x")
    assert actual.shape == (ROWS, width)
    expected = reference_dequantize(data, gguf.GGMLQuantizationType(kind)).astype(np.float32)
    assert actual.float().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_blocks_are_those_of_the_file(kind: int, tmp_path: Path) -> None:
    fmt = FORMATS[kind]
    data = (
        random_blocks(FORMATS[kind].name, 3 * ROWS).reshape(ROWS, -1)
        if fmt.unpack
        else np.ones((ROWS, 4), "u1")
    )
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType(kind))
    finish(writer)
    file = GGUFFile(path)
    if fmt.unpack:
        assert np.array_equal(file.load_blocks("x").numpy(), data)
    else:
        with pytest.raises(ValueError, match="has no blocks"):
            file.load_blocks("x")


def test_every_tensor_of_the_default_model_is_read_exactly() -> None:
    path = fetch_default()
    ours = GGUFFile(path)
    theirs = gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        expected = reference_dequantize(tensor.data, tensor.tensor_type)
        assert ours.load(tensor.name).numpy().tobytes() == expected.tobytes(), tensor.name


def test_metadata_comes_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a", 7)
    writer.add_int32("b", -7)
    writer.add_uint64("c", 1 << 60)
    writer.add_bool("d", True)
    writer.add_string("e", "déjà vu")
    writer.add_array("f", ["x", "", "東"])
    writer.add_array("g", [1, 2, 3])
    writer.add_array("h", [True, False])
    writer.add_float64("i", 0.5)
    finish(writer)
    metadata = GGUFFile(path).metadata
    expected = {"a": 7, "b": -7, "c": 1 << 60, "d": True, "e": "déjà vu", "i": 0.5}
    expected |= {"f": ["x", "", "東"], "g": [1, 2, 3], "h": [True, False]}
    assert {key: metadata[key] for key in expected} == expected
    assert [type(x) for x in metadata["h"]] == [bool, bool]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_is_honoured(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name in "ab":
        writer.add_tensor(name, np.arange(5, dtype=np.float32))
    finish(writer)
    assert GGUFFile(path).load("b").tolist() == [0, 1, 2, 3, 4]


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A complete small file."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "bc", "d"])
    writer.add_array("types", [1, 2, 3])
    writer.add_string("name", "x")
    writer.add_tensor("t", np.ones((4, 32), dtype=np.float32))
    writer.add_tensor(
        "u", np.ones((2, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    finish(writer)
    return path.read_bytes()


def test_every_truncation_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small)
    last = GGUFFile(path).tensors["u"]  # only padding comes after it
    for length in range(last.offset + last.num_bytes):
        path.write_bytes(small[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_refused_or_harmless(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(small) - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, at % 256]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = GGUFFile(path)
    except ModelError:
        return
    for name in file.tensors:
        file.load(name)


@pytest.mark.parametrize("count", [1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("place", ["tensors", "metadata", "array", "string"])
def test_impossible_counts_are_refused_before_anything_is_allocated(
    count: int, place: str, tmp_path: Path
) -> None:
    key = struct.pack("<Q", 1) + b"k"
    body = {
        "tensors": struct.pack("<QQ", count, 0),
        "metadata": struct.pack("<QQ", 0, count),
        "array": struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, count),
        "string": struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, count),
    }[place]
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body + bytes(64))
    with pytest.raises(ModelError):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(40), "letters GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    ],
)
def test_other_files_are_refused_with_a_reason(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_unsupported_tensor_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = np.zeros((1, 66), dtype=np.uint8)
    writer.add_tensor("t", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    finish(writer)
    with pytest.raises(ModelError, match="'t' has type IQ2_XXS"):
        GGUFFile(path)


def test_loaded_views_keep_the_map_alive(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    tensor = GGUFFile(path).load("t")
    path.unlink()
    assert tensor.sum() == 4 * 32


def test_the_file_is_never_written_to(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    GGUFFile(path).load("t").zero_()
    assert path.read_bytes() == small
