"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` once the block ends, and of nothing if it raises.

    It lies in the same folder, and is on disk (fsync) before it gets the name. On Linux it has no name until it is
    whole, so that not even a killed process leaves litter; elsewhere a hidden temporary file is what a kill leaves.

    Args:
        path: Where the file is to be; a symbolic link is followed.
        mode: Permissions of the new file, whatever the umask.

    Raises:
        OSError: It cannot be written; `path` is as it was.
    """
    path = Path(os.path.realpath(path))
    fd, temporary = _open(path)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            if hasattr(os, "fchmod"):
                os.fchmod(fd, mode)
            os.fsync(fd)
            if temporary is None:
                temporary = _name(fd, path)
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    _sync(path.parent)


def _open(path: Path) -> tuple[int, str | None]:
    """A new file in the folder of `path`, and its name if it has one."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # file systems without it, old kernels
            return os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600), None
    return tempfile.mkstemp(dir=path.parent, prefix=".twinkv-", suffix=".part")


def _name(fd: int, path: Path) -> str:
    """Gives a nameless file a name beside `path`; open(2) of Linux describes this way."""
    name = str(path.parent / f".twinkv-{secrets.token_hex(8)}.part")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder)  # with a folder Python calls linkat, and follows
    finally:
        os.close(folder)
    return name


def _sync(folder: Path) -> None:
    """The new name is on disk too. Not every system lets a folder be opened; the file is whole all the same."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
