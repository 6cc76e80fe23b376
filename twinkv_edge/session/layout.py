"""The file: a head in JSON, arrays, and two checksums. `docs/sessions.md` describes every byte.

Every length is compared with the size of the file before it is believed, and nothing is handed out before its checksum
was right. XXH3-128 runs at the speed of memory (11 GB/s where BLAKE2b had 0.3 and CRC-32 1.5), so reading is limited by
the disk. It finds damage; it is no signature: a file that somebody made to deceive has right checksums, which is why
what is read is checked again by those who use it.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ..atomic import replacing
from ..errors import InputError, SessionError

MAGIC: Final = b"\x89TKV\r\n\x1a\n"  # as PNG does it: a file that went through a text mode is noticed at once
VERSION: Final = 1
PREAMBLE: Final = struct.Struct("<8sIIQ")  # magic, version, bytes of the head, bytes of the file
DIGEST: Final = 16
DTYPES: Final[dict[str, np.dtype[Any]]] = {"u8": np.dtype("u1"), "i32": np.dtype("<i4")}
CHUNK: Final = 1 << 20  # hashed while it is in the processor's cache

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]


def is_session(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a session does. False as well where there is none, or it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def write(
    path: Path,
    head: Mapping[str, Any],
    arrays: Mapping[str, Array],
    *,
    mode: int = 0o600,
    progress: Progress | None = None,
) -> int:
    """Writes a file atomically; returns its size in bytes.

    Args:
        head: What JSON can hold; "arrays" is taken.
        arrays: uint8 or int32, of any shape.
        progress: Called with (bytes written, bytes in all).

    Raises:
        InputError: The folder or the disk does not take it; what was at `path` is still there.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    arrays = {k: np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")) for k, a in arrays.items()}
    table = [{"name": k, "dtype": names[a.dtype], "shape": list(a.shape)} for k, a in arrays.items()]
    text = json.dumps({**head, "arrays": table}, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    size = PREAMBLE.size + DIGEST + len(text) + sum(a.nbytes for a in arrays.values()) + DIGEST
    preamble = PREAMBLE.pack(MAGIC, VERSION, len(text), size)
    pieces = [preamble, xxhash.xxh3_128(preamble + text).digest(), text]
    parts = [memoryview(piece) for piece in pieces] + [_bytes_of(a) for a in arrays.values()]
    digest, done = xxhash.xxh3_128(), 0
    try:
        with replacing(path, mode) as file:
            for piece in parts:
                for start in range(0, len(piece), CHUNK):
                    part = piece[start : start + CHUNK]
                    digest.update(part)
                    file.write(part)
                    done += len(part)
                    if progress:
                        progress(done, size)
            file.write(digest.digest())
    except OSError as e:
        raise InputError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from e
    return size


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class SessionFile:
    """A session file that is open for reading; its head was checked.

    Raises:
        InputError: There is no such file, or it cannot be read.
        SessionError: It is no session, is damaged, or was written by a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise InputError(f"{self.path} is not a file; give the path of a session file")
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by the context manager)
        except FileNotFoundError:
            raise InputError(f"no session at {self.path}") from None
        except (OSError, ValueError) as e:
            raise InputError(f"cannot read {self.path}: {e}") from None
        try:
            self._digest = xxhash.xxh3_128()
            self.size = os.fstat(self._file.fileno()).st_size
            self.head = self._read_head()
            self._table = self._read_table()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def arrays(self, progress: Progress | None = None) -> dict[str, Array]:
        """Reads all arrays, once, and checks the checksum of the whole file before it hands any out.

        Raises:
            SessionError: The file is damaged.
        """
        found = {}
        for name, dtype, shape in self._table:
            found[name] = array = np.empty(shape, dtype=dtype)
            self._fill(_bytes_of(array), progress)
        if self._take(DIGEST, hashed=False) != self._digest.digest():
            raise self._damaged("its checksum is wrong")
        return found

    def _damaged(self, what: str) -> SessionError:
        return SessionError(f"{self.path} is damaged: {what}; make it again, or take it from a backup")

    def _read_head(self) -> dict[str, Any]:
        start = self._take(min(PREAMBLE.size, self.size))
        if start[: len(MAGIC)] != MAGIC[: len(start)] or not start:
            raise SessionError(f"{self.path} is not a session file (twinkv-edge compress makes one)")
        if len(start) < PREAMBLE.size:
            raise self._damaged(f"it has only {self.size} bytes")
        _, version, n_head, size = PREAMBLE.unpack(start)
        if version > VERSION:
            raise SessionError(
                f"{self.path} has version {version} of the format, and this twinkv-edge reads up to {VERSION}: "
                "a newer one wrote it (update this one), or it is damaged"
            )
        if version < 1:
            raise self._damaged("there is no version 0 of the format")
        if size != self.size:
            raise self._damaged(f"it has {self.size:,} bytes where {size:,} were written")
        if n_head > size - PREAMBLE.size - 2 * DIGEST:
            raise self._damaged("its head does not fit into it")
        digest, text = self._take(DIGEST), self._take(n_head)
        if digest != xxhash.xxh3_128(start + text).digest():
            raise self._damaged("the checksum of its head is wrong")
        try:
            head = json.loads(text.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as e:
            raise self._damaged(f"its head is no JSON ({e})") from None
        if not isinstance(head, dict):
            raise self._damaged("its head is no JSON object")
        return head

    def _read_table(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        table, total = [], 0
        try:
            for entry in self.head.pop("arrays"):
                name, dtype, shape = entry["name"], DTYPES[entry["dtype"]], tuple(entry["shape"])
                if not isinstance(name, str) or not all(type(n) is int and 0 <= n <= self.size for n in shape):
                    raise ValueError(f"array {name!r} of shape {shape}")
                total += dtype.itemsize * math.prod(shape)
                table.append((name, dtype, shape))
        except (KeyError, TypeError, ValueError) as e:
            raise self._damaged(f"its table of arrays is not as version {VERSION} has it ({e!r})") from None
        if total != self.size - self._file.tell() - DIGEST:
            raise self._damaged("its arrays are not what its head says")
        return table

    def _take(self, n: int, *, hashed: bool = True) -> bytes:
        found = bytearray(n)
        self._fill(memoryview(found), hashed=hashed)
        return bytes(found)

    def _fill(self, into: memoryview, progress: Progress | None = None, *, hashed: bool = True) -> None:
        done = 0
        while done < len(into):
            part = into[done : done + CHUNK]
            try:
                n = self._file.readinto(part)
            except OSError as e:
                raise InputError(f"cannot read {self.path}: {(e.strerror or str(e)).lower()}") from e
            if not n:
                raise self._damaged("it became shorter while it was read")
            if hashed:
                self._digest.update(part[:n])
            done += n
            if progress:
                progress(self._file.tell(), self.size)
