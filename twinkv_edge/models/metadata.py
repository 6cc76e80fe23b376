"""Typed access to the metadata of one architecture."""

from __future__ import annotations

import math
from typing import Final

from ..errors import InputError
from .gguf_header import Header, Skipped, Value

_MAX_COUNT: Final = 1 << 31  # counts and dimensions are 32-bit in llama.cpp


class Metadata:
    """Reads `<architecture>.<key>`; a wrong type or an absurd number is an InputError that names the key."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def get(self, key: str) -> Value | None:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def bad(self, key: str, value: object) -> InputError:
        """The error to raise when `key` holds `value`."""
        return InputError(
            f"{self.header.path} is not a usable GGUF model: {self.architecture}.{key} is {str(value)[:80]}; "
            "get the file again"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """A non-negative 32-bit number, required if there is no default; of an array, the largest."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, tuple):
            return max(self.per_layer(key, len(value), 0), default=0)
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise self.bad(key, "missing" if value is None else value)
        return value

    def per_layer(self, key: str, n_layer: int, default: int) -> tuple[int, ...]:
        """One count per layer, from an array or from one number for all."""
        value = self.get(key)
        if not isinstance(value, tuple):
            return (self.count(key, default),) * n_layer
        counts = tuple(int(v) for v in value[:n_layer] if isinstance(v, int) and 0 <= v < _MAX_COUNT)
        if len(counts) < n_layer:
            raise self.bad(key, value)
        return counts

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.bad(key, value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        return value if isinstance(value, str) else default

    def has(self, *beginnings: str) -> bool:
        """Is there any key of this architecture that begins with one of these?"""
        starts = tuple(f"{self.architecture}.{b}" for b in beginnings)
        return any(key.startswith(starts) for key in self.header.metadata)

    def n_vocab(self) -> int:
        """Tokens of the vocabulary; 0 if the file has none and does not say."""
        tokens = self.header.metadata.get("tokenizer.ggml.tokens")
        return tokens.n_items if isinstance(tokens, Skipped) else self.count("vocab_size", 0)
