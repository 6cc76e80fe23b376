"""Telling models apart by their files, in milliseconds whatever their size."""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import Final

import xxhash

from ..errors import InputError
from .gguf_header import read_header
from .model_facts import other_splits

N_SAMPLES: Final = 256  # pieces of the weights that are looked at: a second of seeks on a hard disk that is cold
SAMPLE_BYTES: Final = 4096


def fingerprint(path: str | os.PathLike[str]) -> str:
    """32 hexadecimal digits (XXH3-128) that another model's file does not have; a copy elsewhere has the same.

    It covers, for every file of a split model: the size; all of the head (metadata, vocabulary, chat template, names,
    shapes and types of the tensors); and 256 pieces of 4 KiB, evenly spread over the weights. So another architecture,
    size, quantization, vocabulary or fine-tune is noticed. A change of few weights that lie between the pieces is not:
    reading all of a model at every load would cost more than what a session saves.

    Raises:
        InputError: The file is missing, unreadable or no usable GGUF.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        read_header(path)  # says what is wrong
        raise
    return _fingerprint(os.fspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _fingerprint(path: str, size: int, changed: int) -> str:
    """Computed once in a process for a file that does not change."""
    header = read_header(path)
    found = xxhash.xxh3_128()
    for part in (header, *other_splits(header)):
        try:
            _add(found, part.path, part.data_start)
        except OSError as e:
            raise InputError(f"{part.path} can't be read: {e}") from None
    return found.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """XXH3-128 of a whole small file (a LoRA adapter), in hexadecimal. Raises OSError."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _add(found: xxhash.xxh3_128, path: Path, start: int) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found.update(struct.pack("<QQ", size, start))
        found.update(file.read(start))
        weights = size - start
        if weights <= N_SAMPLES * SAMPLE_BYTES:
            file.seek(start)
            found.update(file.read(weights))
            return
        for i in range(N_SAMPLES):
            file.seek(start + (weights - SAMPLE_BYTES) * i // (N_SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
