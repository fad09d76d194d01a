"""Tensors of a safetensors file, read one by one. The header is checked in full before any tensor is touched.

The file is read, not mapped: a mapped file that is truncated while it is used kills the process.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lorac.runtime.adapters.files import WEIGHTS, member, parse_object
from lorac.runtime.errors import AdapterError

_MAX_HEADER = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Header:
    """What the header says of one tensor; `begin` and `end` are byte offsets behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file."""

    def __init__(self, folder: Path, file):
        self.folder, self._file = folder, file
        self._stamp = self._stat()
        self.headers, self._start = self._read_headers()

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the file's dtype. Raises AdapterError for a dtype that no adapter has."""
        header = self.headers[name]
        dtype = _DTYPES.get(header.dtype)
        if dtype is None:
            self._refuse(f"tensor {name} has dtype {header.dtype}; expected one of {', '.join(_DTYPES)}")
        if header.begin == header.end:
            return torch.empty(header.shape, dtype=dtype)
        data = self._bytes(self._start + header.begin, header.end - header.begin)
        return torch.frombuffer(data, dtype=dtype).reshape(header.shape)

    def check_unchanged(self) -> None:
        """Raises AdapterError if the file was written to since it was opened: its tensors could be a mixture."""
        if self._stat() != self._stamp:
            self._refuse("the file changed while it was read; load it again when its writer is done")

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _read_headers(self) -> tuple[dict[str, Header], int]:
        size = self._stamp[0]
        if size < 8:
            self._refuse(f"truncated: {size} bytes, and the length of the header alone takes 8")
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(_MAX_HEADER, size - 8):
            self._refuse(f"truncated or not safetensors: it announces a header of {length} bytes in a file of {size}")
        try:
            entries = parse_object(bytes(self._bytes(8, length)))
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is not what safetensors writes: {error or 'nested too deeply'}")
        entries.pop("__metadata__", None)
        headers = {name: self._header(name, entry) for name, entry in entries.items()}
        end = 0
        for header in sorted(headers.values(), key=lambda header: (header.begin, header.end)):
            if header.begin != end:
                self._refuse(f"tensor {header.name} starts at byte {header.begin}, the one before it ends at {end}")
            end = header.end
        if end != size - 8 - length:
            self._refuse(
                f"truncated or padded: the header describes {end} bytes of tensors, there are {size - 8 - length}"
            )
        return headers, 8 + length

    def _header(self, name: str, entry: object) -> Header:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            self._refuse(f"the header's entry of tensor {name[:200]!r} lacks dtype, shape or data_offsets")
        if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            self._refuse(f"the header's entry of tensor {name[:200]!r} has a dtype, shape or offset of the wrong type")
        if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            self._refuse(
                f"tensor {name[:200]} of shape {list(shape)} and dtype {dtype} cannot take {end - begin} bytes"
            )
        return Header(name, dtype, shape, begin, end)

    def _bytes(self, offset: int, count: int) -> bytearray:
        data = bytearray(count)
        self._file.seek(offset)
        if self._file.readinto(data) != count:
            self._refuse(f"truncated: {count} bytes expected at offset {offset}")
        return data

    def _refuse(self, message: str):
        raise AdapterError(f"adapter {self.folder}: {WEIGHTS}: {message}")


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """The folder's adapter_model.safetensors. Raises AdapterError for a file whose header lies."""
    path = member(folder, WEIGHTS)
    try:
        with open(path, "rb") as file:
            yield TensorFile(folder, file)
    except OSError as error:
        raise AdapterError(f"adapter {folder}: {WEIGHTS} cannot be read: {error}") from error
