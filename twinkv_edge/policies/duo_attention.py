from __future__ import annotations

import os

import numpy as np

from ..errors import InputError
from .base import BoolArray, FloatArray, IntArray, LayerView, Policy


class DuoAttention(Policy):
    """Retrieval heads keep everything, streaming heads their sinks and the most recent tokens.

    DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads (Xiao et al., 2024). Which
    head is which comes from a pattern file as the authors publish it (full_attention_heads.tsv): a line per layer, a
    number per KV head, the larger the more it retrieves. The ratio says how many can be retrieval heads; the highest
    numbers are, and what is left of the budget goes to the next as recent tokens.
    """

    name = "duo_attention"
    summary = "retrieval heads keep all, the others sinks and recent tokens (pattern=FILE; Xiao et al., 2024)"
    ragged = True

    def __init__(self, pattern: str | os.PathLike[str] | None = None, sink: int = 64, recent: int = 256) -> None:
        if pattern is None:
            raise InputError(
                "duo_attention needs a pattern file, policy_options={'pattern': 'full_attention_heads.tsv'}: a line "
                "per layer, a number per KV head"
            )
        if sink < 0 or recent < 1:
            raise InputError(f"sink ({sink}) must not be negative and recent ({recent}) at least 1")
        self.pattern = read_pattern(pattern)
        self.sink = sink
        self.recent = recent

    def score(self, layer: LayerView) -> FloatArray:
        return np.where(layer.positions < self.sink, layer.n_tokens, layer.positions).astype(np.float32)

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        n_heads, n = scores.shape
        if self.pattern.shape != (layer.n_layers, n_heads):
            found = " x ".join(str(size) for size in self.pattern.shape)
            raise InputError(
                f"the pattern is {found}, but this model has {layer.n_layers} layers of {n_heads} KV heads: it is of "
                "another model"
            )
        streaming = min(keep, max(self.sink + self.recent, int(always.sum(axis=-1).max())))
        return np.asarray(share_out(self.pattern, n, keep, streaming)[layer.index])


def share_out(pattern: FloatArray, n: int, keep: int, streaming: int) -> IntArray:
    """Budgets that add up to keep * L * H, int32 [L, H]: n for the largest numbers, `streaming` for the others."""
    flat = np.full(pattern.size, streaming, dtype=np.int32)
    left = (keep - streaming) * pattern.size
    for head in np.argsort(-pattern, axis=None, kind="stable"):
        more = min(left, n - streaming)
        flat[head] += more
        left -= more
    return flat.reshape(pattern.shape)


def read_pattern(path: str | os.PathLike[str]) -> FloatArray:
    """A pattern file: float32 [L, H].

    Raises:
        InputError: It cannot be read, or is no table of numbers.
    """
    try:
        with open(path, encoding="utf-8") as file:
            rows = [line.replace(",", " ").split() for line in file if line.strip()]
        pattern = np.array(rows, dtype=np.float32)
    except OSError as why:
        raise InputError(f"{path} cannot be read: {why.strerror}") from why
    except ValueError as why:
        raise InputError(f"{path} is no table of numbers, a line per layer and a number per KV head: {why}") from why
    if pattern.ndim != 2 or pattern.size == 0 or not np.isfinite(pattern).all():
        raise InputError(f"{path} is no table of numbers, a line per layer and a number per KV head")
    return pattern
