"""KV-cache eviction with the TwinKV repair pass, per attention head, on an unmodified llama-cpp-python."""

from . import _install

_install.check()

from . import models, policies  # noqa: E402  (the check comes first: its message says what to reinstall)
from ._version import __version__  # noqa: E402
from .compression import Compression  # noqa: E402
from .errors import (  # noqa: E402
    CacheStateError,
    InputError,
    InstallError,
    StateFormatError,
    TwinKVError,
    UnsupportedModelError,
)
from .kv_cache import KVCache  # noqa: E402
from .llama import CompressedLlama, score  # noqa: E402
from .repair import Repair, repair  # noqa: E402
from .report import CompressionReport, Footprint  # noqa: E402
from .twins import best_twin, twin_counts  # noqa: E402

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
    "models",
    "policies",
    "repair",
    "score",
    "twin_counts",
]
