"""Are the package and the installed llama-cpp-python the pair that was built together? Asked at import."""

from __future__ import annotations

import importlib
from importlib import metadata

from .errors import InstallError

REINSTALL = (
    "reinstall twinkv-edge beside it (in a checkout: ./scripts/setup; otherwise: "
    "pip install --force-reinstall --no-deps twinkv-edge)"
)


def check_versions() -> None:
    """Raises InstallError when the extension was built against another llama-cpp-python than the one installed.

    It reads llama.cpp's tensors and sequence states directly, and another build may lay them out differently: the
    versions must be equal, not merely compatible. Loads nothing.
    """
    try:
        built_with = importlib.import_module("twinkv_edge._built_with").LLAMA_CPP_PYTHON
        installed = metadata.version("llama-cpp-python")
    except ModuleNotFoundError:
        return  # never built, or no llama.cpp: the twin kernels can do without, the rest says so when it is asked for
    if installed != built_with:
        raise InstallError(
            f"twinkv_edge was built against llama-cpp-python {built_with}, but {installed} is installed; {REINSTALL}"
        )
