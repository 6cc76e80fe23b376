"""The native extension, and whether it and the installed llama-cpp-python are the pair that was built together."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from .errors import InstallError

REINSTALL = (
    "reinstall twinkv-edge beside it (in a checkout: ./scripts/setup; otherwise: "
    "pip install --force-reinstall --no-deps twinkv-edge)"
)


def _load() -> tuple[Any, str | None]:
    """The extension, or None and why it cannot be used. Without it the twin kernels run on numba."""
    import llama_cpp  # loads libllama first: the extension then binds to the very same library

    try:
        module = importlib.import_module("twinkv_edge._native")
    except ImportError as e:
        return None, f"the native extension cannot be loaded ({e}); {REINSTALL}"
    installed = metadata.version("llama-cpp-python")
    built_with = module.BUILT_WITH_LLAMA_CPP_PYTHON
    # The extension reads llama.cpp's tensors and sequence states directly: another build may lay them out differently.
    if installed != built_with:
        raise InstallError(
            f"twinkv_edge was built against llama-cpp-python {built_with}, but {installed} is installed; {REINSTALL}"
        )
    if llama_cpp.__version__ != installed:
        raise InstallError(
            f"llama_cpp {llama_cpp.__version__} was imported, but llama-cpp-python {installed} is installed: "
            "two copies are on the path; keep one"
        )
    return module, None


class _Missing:
    """Stands in for an extension that is not there: whatever is asked of it says what to do."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise InstallError(self._reason)


_module, _reason = _load()
native: Any = _module if _module is not None else _Missing(_reason or "")
