"""Reading the document a question is about."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import InputError


def read_document(source: str) -> str:
    """The text of a file, or of standard input when `source` is "-".

    Raises:
        InputError: No such file, unreadable, not UTF-8, or empty.
    """
    name = "standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as e:
        raise InputError(f"cannot read {name}: {(e.strerror or str(e)).lower()}") from e
    except ValueError as e:  # a NUL in the path
        raise InputError(f"cannot read {name!r}: {e}") from e
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{name} is not UTF-8 text (byte {e.start} is 0x{raw[e.start]:02x}); convert it, for example with iconv"
        ) from e
    if not text.strip():
        raise InputError(f"{name} is empty")
    return text
