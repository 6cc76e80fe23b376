from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Policy


class StreamingLLM(Policy):
    """Sinks and the most recent tokens.

    Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2024). We keep true positions; the paper
    renumbers them inside the cache.
    """

    name = "streaming_llm"
    summary = "the first tokens and the most recent ones (Xiao et al., 2024)"

    def __init__(self, n_sink: int = 4) -> None:
        self.n_sink = n_sink

    def score(self, layer: LayerView) -> FloatArray:
        return np.where(layer.positions < self.n_sink, layer.n_tokens, layer.positions).astype(np.float32)
