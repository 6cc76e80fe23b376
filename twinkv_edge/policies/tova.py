from __future__ import annotations

import numpy as np

from .attention import window_attention
from .base import FloatArray, LayerView, Needs, Policy


class TOVA(Policy):
    """Keeps what the last token attends to, averaged over all heads of the layer.

    Transformers are Multi-State RNNs (Oren et al., 2024). Heads that hold different tokens, after an eviction per head,
    are averaged token by token over those that hold it.
    """

    name = "tova"
    summary = "keeps what the last token attends to (Oren et al., 2024)"
    needs = Needs(query_window=1)

    def score(self, layer: LayerView) -> FloatArray:
        attention = window_attention(layer, layer.last_queries(1))
        by_token = np.bincount(layer.positions.ravel(), attention.ravel(), minlength=layer.n_tokens)
        holders = np.bincount(layer.positions.ravel(), minlength=layer.n_tokens)
        scores = (by_token / np.maximum(1, holders))[layer.positions]
        last = layer.positions == layer.n_tokens - 1
        scores[last] = scores[~last].max(initial=0) + 1
        return scores.astype(np.float32)
