"""Every error a caller may want to catch. Each message says what to do; each is raised before anything changes."""

from __future__ import annotations


class TwinKVError(Exception):
    """Base of all errors of this package."""


class InputError(TwinKVError, ValueError):
    """An argument, a document or a model file is not usable as given."""


class UnsupportedModelError(TwinKVError):
    """The model keeps no KV cache that can be rewritten (recurrent, hybrid, MLA, encoder-only, M-RoPE)."""


class CacheStateError(TwinKVError):
    """The cache is not in the state the operation needs (empty, compressed past a rollback, changed from outside)."""


class StateFormatError(TwinKVError):
    """llama.cpp laid out a sequence state in a way this version of the package does not know."""


class SessionError(TwinKVError):
    """A session file is damaged, or does not belong to this model, this cache, or this version of the package."""


class InstallError(TwinKVError, ImportError):
    """The native extension and the installed llama-cpp-python do not belong together."""
