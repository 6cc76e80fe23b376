"""KV-cache eviction with the TwinKV repair pass, per attention head, on an unmodified llama-cpp-python."""

from . import models, policies
from ._version import __version__
from .compression import Compression
from .errors import (
    CacheStateError,
    InputError,
    InstallError,
    StateFormatError,
    TwinKVError,
    UnsupportedModelError,
)
from .kv_cache import KVCache
from .llama import CompressedLlama, score
from .models import estimate
from .repair import Repair, repair
from .report import CompressionReport, Footprint
from .twins import best_twin, twin_counts

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
