"""KV-cache eviction with the TwinKV repair pass, per attention head, on an unmodified llama-cpp-python."""

from ._version import __version__

__all__ = ["__version__"]
