"""GGUF files: metadata and tensors, read through a memory map.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The file
is not trusted: every count and length is checked against the bytes that are there before anything is
allocated, and whatever does not fit raises :class:`~pyserve.errors.ModelError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyserve.errors import ModelError
from pyserve.models.dequantize import FORMATS, UNSUPPORTED, BlockFormat, dequantize
from pyserve.models.source import StoredTensor

MAGIC = b"GGUF"
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NESTING = 4  # arrays of arrays; nothing in use nests at all
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` has rows first; ``offset`` is in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: ``metadata`` as plain Python values, ``tensors`` by name in file order.

    Tensors that :meth:`load` returns in a plain type are views of the map and keep it alive, so nothing
    needs closing. Raises ModelError where the file is not GGUF, damaged, cut short, or holds a tensor
    type that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A private map: torch wants writable memory, and nobody's writes reach the file.
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}") from error
        try:
            self.metadata, self.tensors = _Parser(self._map).parse()
        except _Damaged as error:
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from None

    def load(self, name: str) -> Tensor:
        """The tensor in its shape: float32 where it was quantised, else in the file's own dtype (a view)."""
        info = self.tensors[name]
        return dequantize(self._bytes(info), info.format).view(info.shape)

    def load_blocks(self, name: str) -> Tensor:
        """A quantised matrix as it lies in the file: uint8 ``[rows, bytes of a row's blocks]``, a view.

        Raises ValueError where the tensor is not quantised.
        """
        info = self.tensors[name]
        if info.format.unpack is None:
            raise ValueError(f"{name} is {info.format.name}, which has no blocks")
        return self._bytes(info).view(math.prod(info.shape[:-1]), -1)

    def release(self, name: str) -> None:
        """Lets the system take back the pages that the tensor was read through; views stay valid."""
        info = self.tensors[name]
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.num_bytes - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def _bytes(self, info: TensorInfo) -> Tensor:
        return torch.frombuffer(
            self._map, dtype=torch.uint8, count=info.num_bytes, offset=info.offset
        )

    def stored(self, name: str) -> StoredTensor:
        """The header's word on a tensor."""
        info = self.tensors[name]
        return StoredTensor(info.shape, info.format.name, info.num_bytes)


class _Damaged(Exception):
    """What is wrong with the file, as the end of a sentence."""


class _Parser:
    """Reads a file's header front to back; ``offset`` is the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.offset = 0

    def parse(self) -> tuple[Mapping[str, object], Mapping[str, TensorInfo]]:
        if self.data[:4] != MAGIC:
            raise _Damaged("it does not begin with the letters GGUF")
        self.offset = 4
        version = self.integer("<I")
        if version not in (2, 3):
            swapped = version and version & 0xFFFF == 0
            raise _Damaged(
                "it is big-endian, which is not supported"
                if swapped
                else f"version {version} is not supported (2 and 3 are)"
            )
        # No tensor takes fewer than 24 bytes of header, no metadata entry fewer than 13.
        num_tensors = self.count("tensors", 24)
        num_entries = self.count("metadata entries", 13)
        metadata: dict[str, object] = {}
        for _ in range(num_entries):
            key = self.text(strict=True)
            if key in metadata:
                raise _Damaged(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.integer("<I"))
        headers = [self.tensor_header() for _ in range(num_tensors)]
        return metadata, self.place(headers, metadata)

    def take(self, length: int) -> int:
        """Moves over ``length`` bytes; the offset they begin at."""
        start = self.offset
        if length > self.size - start:
            raise _Damaged(f"it ends early: {length} bytes wanted at {start} of {self.size}")
        self.offset = start + length
        return start

    def integer(self, code: str) -> int:
        start = self.take(struct.calcsize(code))
        value: int = struct.unpack_from(code, self.data, start)[0]
        return value

    def count(self, what: str, min_bytes_each: int) -> int:
        """A 64-bit count of things that each take at least ``min_bytes_each`` of the bytes to come."""
        value = self.integer("<Q")
        if value * min_bytes_each > self.size - self.offset:
            raise _Damaged(f"it claims {value} {what}, more than its {self.size} bytes can hold")
        return value

    def text(self, *, strict: bool = False) -> str:
        length = self.integer("<Q")
        start = self.take(length)
        raw = self.data[start : start + length]
        try:
            return raw.decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError:
            raise _Damaged(f"the name at byte {start} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            if depth == _MAX_NESTING:
                raise _Damaged("its metadata nests arrays too deeply")
            return self.array(depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise _Damaged(f"metadata type {kind} is not known")
        start = self.take(struct.calcsize(code))
        return struct.unpack_from(code, self.data, start)[0]

    def array(self, depth: int) -> list[object]:
        kind = self.integer("<I")
        code = _SCALARS.get(kind)
        if code is not None:
            size = struct.calcsize(code)
            count = self.count("array elements", size)
            start = self.take(count * size)
            dtype = np.dtype(code.replace("?", "u1"))
            values = np.frombuffer(self.data, dtype, count, start)
            return list((values.astype(np.bool_) if kind == 7 else values).tolist())
        if kind == _STRING:
            return list(self.strings(self.count("strings", 8)))
        count = self.count("arrays", 12)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """``count`` strings; a vocabulary has 10^5, so the loop is spelled out."""
        data, size, offset = self.data, self.size, self.offset
        unpack: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            start = offset + 8
            if start > size:
                raise _Damaged("it ends early, inside a list of strings")
            offset = start + unpack(data, offset)[0]
            if offset > size:
                raise _Damaged("it ends early, inside a list of strings")
            result.append(data[start:offset].decode("utf-8", "replace"))
        self.offset = offset
        return result

    def tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape with rows first, type number, offset from the data's start)."""
        name = self.text(strict=True)
        num_dims = self.integer("<I")
        if num_dims > _MAX_DIMS:
            raise _Damaged(f"tensor {name!r} claims {num_dims} dimensions")
        shape = tuple(reversed([self.integer("<Q") for _ in range(num_dims)]))
        return name, shape, self.integer("<I"), self.integer("<Q")

    def place(
        self, headers: list[tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, object]
    ) -> Mapping[str, TensorInfo]:
        """Checks every tensor against the file and gives it its place in it."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _Damaged(f"its alignment is {alignment!r}, not a power of two")
        data_start = -(-self.offset // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in headers:
            if name in tensors:
                raise _Damaged(f"tensor {name!r} appears twice")
            fmt = _format(name, kind)
            row = shape[-1] if shape else 1
            if row % fmt.block_size:
                raise _Damaged(f"rows of tensor {name!r} are no whole number of {fmt.name} blocks")
            num_bytes = math.prod(shape) // fmt.block_size * fmt.block_bytes
            if num_bytes == 0 or offset % alignment:
                raise _Damaged(f"tensor {name!r} is empty or not aligned")
            if data_start + offset + num_bytes > self.size:
                raise _Damaged(
                    f"it ends early: tensor {name!r} needs bytes {data_start + offset} to"
                    f" {data_start + offset + num_bytes} of {self.size}; is the download complete?"
                )
            tensors[name] = TensorInfo(name, shape, fmt, data_start + offset, num_bytes)
        return tensors


def _format(name: str, kind: int) -> BlockFormat:
    fmt = FORMATS.get(kind)
    if fmt is None:
        supported = ", ".join(known.name for known in FORMATS.values())
        raise _Damaged(
            f"tensor {name!r} has type {UNSUPPORTED.get(kind, kind)}, which is not supported"
            f" ({supported} are)"
        )
    return fmt
