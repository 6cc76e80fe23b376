from __future__ import annotations

import numpy as np

from ..errors import InputError
from .attention import window_attention
from .base import FloatArray, LayerView, Needs, Policy


class SnapKV(Policy):
    """Keeps what the last tokens attend to, and its neighbours: attention from a window of queries, averaged over the
    window and the group and smoothed along the sequence; the window itself is kept.

    SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., 2024). Pooling is an average, as in
    KVPress. A prompt no longer than the window leaves nothing to score: the window becomes half of it.
    """

    name = "snapkv"
    summary = "keeps what the last 64 tokens attend to (Li et al., 2024)"

    def __init__(self, window: int = 64, kernel: int = 5) -> None:
        if window < 1 or kernel < 1 or kernel % 2 == 0:
            raise InputError(f"window ({window}) must be at least 1 and kernel ({kernel}) odd")
        self.window = window
        self.kernel = kernel
        self.needs = Needs(query_window=window)

    def score(self, layer: LayerView) -> FloatArray:
        window = self.window
        if layer.n_tokens <= window:
            window = max(1, layer.n_tokens // 2)
            layer.note(
                f"the prompt of {layer.n_tokens} tokens is not longer than the window of {self.window} queries: the "
                f"window was shrunk to {window}"
            )
        last = layer.last_queries(window)
        attention = window_attention(layer, last)
        scores = np.zeros_like(attention)
        in_window = layer.positions >= last.positions[0]
        for head, before in enumerate((~in_window).sum(axis=-1)):
            scores[head, :before] = smooth(attention[head, :before], self.kernel)
        scores[in_window] = scores.max() + 1
        return scores


def smooth(row: FloatArray, kernel: int) -> FloatArray:
    """Moving average, float32 [n] -> [n]; beyond the ends are zeros."""
    if row.size == 0:
        return row
    padded = np.pad(row, kernel // 2)
    return np.asarray(np.convolve(padded, np.full(kernel, 1 / kernel, dtype=np.float32), mode="valid"), np.float32)
