"""The head of a GGUF file: metadata and the table of tensors, without weights and without the vocabulary.

`gguf.GGUFReader` makes a Python object of every token and merge of the vocabulary: seconds for a model whose
head this reads in milliseconds. Long arrays are stepped over, only their length is kept. Every length is
checked against the size of the file before anything is allocated: a broken file is an InputError and nothing
else.

Format: `ggml/include/gguf.h` of llama.cpp, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ..errors import InputError
from .ggml_types import GGML_TYPES, GgmlType

_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9

_CHUNK = 1 << 20  # the file is read in pieces of this size
_MAX_KEPT_ITEMS = 4096  # longer arrays are vocabularies; llama.cpp allows 512 layers
_MAX_KEPT_TEXT = 1 << 24
_MAX_STRINGS = 1 << 24  # a vocabulary; more is a broken count that would take minutes to step over
_MAX_NAME = 1 << 16
_MAX_DIMS = 4


class Skipped(NamedTuple):
    """An array, or a very long string, that was stepped over."""

    n_items: int


Value = int | float | bool | str | tuple[int | float | bool | str, ...] | Skipped


class Tensor(NamedTuple):
    """One entry of the tensor table. `shape` is in ggml's order: the contiguous dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensor table of one GGUF file."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    data_start: int = 0  # where the weights begin in the file

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, padding between them not counted."""
        return sum(t.n_bytes for t in self.tensors.values())


class _Broken(Exception):
    """What is wrong with the file, in a few words."""


class _Cursor:
    """Reads a file forward through a buffer; never past its end, never more than it holds."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.buffer, self.pos, self.base = b"", 0, 0

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self.size - self.base - self.pos

    def offset(self) -> int:
        return self.base + self.pos

    def _fill(self, n: int) -> None:
        """At least n bytes in the buffer from `pos` on."""
        have = len(self.buffer) - self.pos
        if have >= n:
            return
        if n > self.left:
            raise _Broken("it ends in the middle of its header")
        rest = self.buffer[self.pos :]
        self.base, self.pos = self.offset(), 0
        self.buffer = rest + self.file.read(max(n - have, _CHUNK))
        if len(self.buffer) < n:
            raise _Broken("it became shorter while it was read")

    def skip(self, n: int) -> None:
        if n > self.left:
            raise _Broken("it ends in the middle of its header")
        if self.pos + n <= len(self.buffer):
            self.pos += n
        else:
            self.base, self.pos, self.buffer = self.offset() + n, 0, b""
            self.file.seek(self.base)

    def scalar(self, kind: struct.Struct) -> int | float | bool:
        self._fill(kind.size)
        value: int | float | bool = kind.unpack_from(self.buffer, self.pos)[0]
        self.pos += kind.size
        return value

    def count(self, kind: struct.Struct = _U64) -> int:
        return int(self.scalar(kind))

    def text(self, n: int) -> str:
        self._fill(n)
        raw = self.buffer[self.pos : self.pos + n]
        self.pos += n
        return raw.decode("utf-8", errors="replace")

    def name(self) -> str:
        """A metadata key or the name of a tensor."""
        n = self.count()
        if n > _MAX_NAME:
            raise _Broken(f"it announces a name of {n} bytes")
        return self.text(n)

    def skip_strings(self, n: int) -> None:
        """Step over n strings: the one loop that runs once per token of the vocabulary."""
        if n > _MAX_STRINGS or n * _U64.size > self.left:
            raise _Broken(f"it announces an array of {n} strings")
        unpack = _U64.unpack_from
        while n:
            self._fill(_U64.size)
            buffer, pos, last = self.buffer, self.pos, len(self.buffer) - _U64.size
            for _ in range(n):
                if pos > last:
                    break
                pos += 8 + unpack(buffer, pos)[0]
                n -= 1
            self.skip(pos - self.pos)


def read_header(path: str | os.PathLike[str], keep: frozenset[str] = frozenset()) -> Header:
    """Metadata and tensor table of the GGUF file at `path`; arrays named in `keep` are read whole.

    Raises InputError when there is no such file, it can't be read, it is not a GGUF file, its header is
    broken, or it ends before the weights its header announces.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path} is not a file; give the path of a GGUF file")
            return _parse(path, _Cursor(file, status.st_size), keep)
    except _Broken as why:
        raise InputError(f"{path} is not a usable GGUF model: {why}; get the file again") from None
    except FileNotFoundError:
        raise InputError(f"no model at {path}; give the path of a GGUF file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a directory; give the path of a GGUF file in it") from None
    except (OSError, ValueError) as why:  # ValueError: a null byte in the path
        raise InputError(f"{path} can't be read: {why}") from None


def _parse(path: Path, at: _Cursor, keep: frozenset[str]) -> Header:
    if at.size == 0:
        raise _Broken("it is empty")
    if at.size < 24:
        raise _Broken(f"it has only {at.size} bytes")
    if at.text(4) != "GGUF":
        raise _Broken("it does not begin with 'GGUF'")
    version = at.count(_U32)
    if version & 0xFFFF == 0:
        raise _Broken("it is big endian, made for another kind of machine")
    if version not in (2, 3):
        raise _Broken(f"version {version} of the format is not 2 or 3")
    n_tensors, n_metadata = at.count(), at.count()
    if n_metadata * 13 > at.left or n_tensors * 24 > at.left:  # the least an entry can take
        raise _Broken(f"it announces {n_metadata} metadata entries and {n_tensors} tensors")
    metadata: dict[str, Value] = {}
    for _ in range(n_metadata):
        key = at.name()
        if not key or key in metadata:
            raise _Broken(f"the metadata key {key[:80]!r} is empty or there twice")
        metadata[key] = _value(at, key, key in keep)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise _Broken(f"its alignment {alignment!r} is not a power of two")
    table = [_tensor(at) for _ in range(n_tensors)]
    start = -(-at.offset() // alignment) * alignment
    end = max((start + offset + tensor.n_bytes for tensor, offset in table), default=0)
    if end > at.size:
        raise _Broken(f"{end - at.size} of the {end} bytes it should have are missing")
    tensors = {tensor.name: tensor for tensor, _ in table}
    if len(tensors) < n_tensors:
        raise _Broken("two tensors have the same name")
    return Header(path, version, metadata, tensors, start)


def _value(at: _Cursor, key: str, whole: bool) -> Value:
    kind = at.count(_U32)
    if kind == _STRING:
        n = at.count()
        if n <= _MAX_KEPT_TEXT:
            return at.text(n)
        at.skip(n)
        return Skipped(n)
    if kind == _ARRAY:
        return _array(at, key, whole)
    if kind not in _SCALARS:
        raise _Broken(f"the metadata entry {key[:80]!r} has an unknown type {kind}")
    return at.scalar(_SCALARS[kind])


def _array(at: _Cursor, key: str, whole: bool) -> Value:
    kind, n = at.count(_U32), at.count()
    if kind == _STRING:
        if whole and n * _U64.size <= at.left:
            return tuple(at.text(at.count()) for _ in range(n))
        at.skip_strings(n)
        return Skipped(n)
    if kind not in _SCALARS:  # arrays of arrays are not in the format llama.cpp reads
        raise _Broken(f"the metadata array {key[:80]!r} has an unknown type {kind}")
    if n > _MAX_KEPT_ITEMS and not (whole and n <= at.left):
        at.skip(n * _SCALARS[kind].size)
        return Skipped(n)
    return tuple(at.scalar(_SCALARS[kind]) for _ in range(n))


def _tensor(at: _Cursor) -> tuple[Tensor, int]:
    """A tensor and its offset in the data section."""
    name = at.name()
    n_dims = at.count(_U32)
    if n_dims > _MAX_DIMS:
        raise _Broken(f"the tensor {name[:80]!r} has {n_dims} dimensions")
    shape = tuple(at.count() for _ in range(n_dims))
    kind = GGML_TYPES.get(at.count(_U32))
    offset = at.count()
    if kind is None:
        raise _Broken(f"the tensor {name[:80]!r} has a type this version of llama.cpp does not know")
    row = shape[0] if shape else 1
    if row % kind.block:
        raise _Broken(f"the rows of tensor {name[:80]!r} are not whole blocks of {kind.name}")
    return Tensor(name, shape, kind, row // kind.block * kind.size * math.prod(shape[1:])), offset
