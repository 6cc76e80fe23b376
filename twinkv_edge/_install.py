"""Are the native extension and the installed llama-cpp-python the pair that was built together?"""

from __future__ import annotations

from importlib import metadata

from .errors import InstallError

REINSTALL = (
    "reinstall twinkv-edge beside it: pip install --force-reinstall --no-deps --no-build-isolation twinkv-edge "
    "(or, in a checkout, ./scripts/setup)"
)


def check() -> None:
    """Raises InstallError when the llama.cpp loaded is not the one the extension was built against.

    The extension reads llama.cpp's tensors and sequence states directly: a different build may lay them out
    differently, so the versions must be equal, not merely compatible.
    """
    import llama_cpp  # loads libllama first: the extension then binds to the very same library

    try:
        from . import _native
    except ImportError as e:
        raise InstallError(f"twinkv_edge's native extension cannot be loaded ({e}); {REINSTALL}") from e
    installed = metadata.version("llama-cpp-python")
    built_with = _native.BUILT_WITH_LLAMA_CPP_PYTHON
    if installed != built_with:
        raise InstallError(
            f"twinkv_edge was built against llama-cpp-python {built_with}, but {installed} is installed; {REINSTALL}"
        )
    if llama_cpp.__version__ != installed:
        raise InstallError(
            f"llama_cpp {llama_cpp.__version__} was imported, but llama-cpp-python {installed} is installed: "
            "two copies are on the path; keep one"
        )
