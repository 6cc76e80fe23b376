"""Reading the document a question is about: text as it is, PDF and DOCX through libraries that are an extra."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

from ..errors import InputError

_EXTRA = "pip install 'twinkv-edge[documents]'"


def read_document(source: str) -> str:
    """The text of a file, or of standard input when `source` is "-".

    What it is shows in its first bytes, not in its name.

    Raises:
        InputError: No such file, unreadable, not UTF-8, without text, or of a kind whose library is not installed.
    """
    name = "standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).expanduser().read_bytes()
    except OSError as e:
        raise InputError(f"cannot read {name}: {(e.strerror or str(e)).lower()}") from e
    except ValueError as e:  # a NUL in the path
        raise InputError(f"cannot read {name!r}: {e}") from e
    if raw.startswith(b"%PDF-"):
        text = _pdf(raw, name)
    elif raw.startswith(b"PK\x03\x04"):
        text = _docx(raw, name)
    else:
        text = _text(raw, name)
    if not text.strip():
        raise InputError(f"{name} is empty" if not raw.strip() else f"{name} holds no text (scanned pages need OCR)")
    return text


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{name} is not UTF-8 text (byte {e.start} is 0x{raw[e.start]:02x}); convert it, for example with iconv"
        ) from e


def _pdf(raw: bytes, name: str) -> str:
    try:
        import pypdf
    except ImportError:
        raise InputError(f"{name} is a PDF, and pypdf is not installed: {_EXTRA}") from None
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(raw)).pages]
    except Exception as e:  # a damaged or encrypted PDF may raise nearly anything
        raise InputError(f"{name} cannot be read as a PDF: {type(e).__name__}: {e}") from e
    return "\n\n".join(page.strip() for page in pages if page.strip())


def _docx(raw: bytes, name: str) -> str:
    """Paragraphs and tables in their order; a row of a table becomes a line."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            is_docx = "word/document.xml" in archive.namelist()
    except zipfile.BadZipFile as e:
        raise InputError(f"{name} cannot be read as a DOCX: {e}") from e
    if not is_docx:
        raise InputError(f"{name} is a ZIP archive and not a DOCX: give text, a PDF or a DOCX")
    try:
        import docx
        from docx.table import Table
    except ImportError:
        raise InputError(f"{name} is a DOCX, and python-docx is not installed: {_EXTRA}") from None
    try:
        parts = []
        for block in docx.Document(io.BytesIO(raw)).iter_inner_content():
            if isinstance(block, Table):
                parts.append("\n".join("\t".join(cell.text for cell in row.cells) for row in block.rows))
            else:
                parts.append(block.text)
    except Exception as e:  # as above
        raise InputError(f"{name} cannot be read as a DOCX: {type(e).__name__}: {e}") from e
    return "\n\n".join(part for part in parts if part.strip())
