"""The native extension, loaded after llama_cpp; or what to do where it cannot be."""

from __future__ import annotations

import importlib
from typing import Any

from ._versions import REINSTALL
from .errors import InstallError


def _load() -> tuple[Any, str]:
    """The extension, or None and why it cannot be used."""
    import llama_cpp  # loads libllama first: the extension then binds to the very same library

    try:
        module = importlib.import_module("twinkv_edge._native")
    except ImportError as e:
        return None, f"the native extension cannot be loaded ({e}); {REINSTALL}"
    if llama_cpp.__version__ != module.BUILT_WITH_LLAMA_CPP_PYTHON:
        raise InstallError(
            f"llama_cpp {llama_cpp.__version__} was imported, but twinkv_edge was built against "
            f"{module.BUILT_WITH_LLAMA_CPP_PYTHON}; {REINSTALL}"
        )
    return module, ""


class _Missing:
    """Stands in for an extension that is not there: whatever is asked of it says what to do."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise InstallError(self._reason)


_module, reason = _load()
"""Why the extension cannot be used; empty when it can."""
native: Any = _module if _module is not None else _Missing(reason)
"""The extension; always taken from here, so that llama_cpp is loaded before it."""
