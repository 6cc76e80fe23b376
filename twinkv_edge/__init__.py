"""KV-cache eviction with the TwinKV repair pass, per attention head, on an unmodified llama-cpp-python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import models, policies
from ._version import __version__
from ._versions import check_versions
from .compression import Compression
from .errors import (
    CacheStateError,
    InputError,
    InstallError,
    SessionError,
    StateFormatError,
    TwinKVError,
    UnsupportedModelError,
)
from .models import estimate
from .repair import Repair, repair
from .report import CompressionReport, Footprint
from .twins import best_twin, twin_counts

check_versions()

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .llama import CompressedLlama, score
    from .session import Session

__all__ = [
    "CacheStateError",
    "CompressedLlama",
    "Compression",
    "CompressionReport",
    "Footprint",
    "InputError",
    "InstallError",
    "KVCache",
    "Repair",
    "Session",
    "SessionError",
    "StateFormatError",
    "TwinKVError",
    "UnsupportedModelError",
    "__version__",
    "best_twin",
    "estimate",
    "models",
    "policies",
    "repair",
    "score",
    "twin_counts",
]

# These load llama.cpp (Session: xxhash), which the command line's --help and a look at a model's facts can do without.
_LATE = {"KVCache": "kv_cache", "CompressedLlama": "llama", "score": "llama", "Session": "session"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATE[name]}", __name__), name)
    globals()[name] = value
    return value
