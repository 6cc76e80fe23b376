from __future__ import annotations

import numpy as np

from ..errors import InputError
from ..key_space import mean_rotation
from .adakv import across_heads
from .attention import softmax
from .base import BoolArray, FloatArray, IntArray, LayerView, Needs, Policy

GUARDED = 0.2  # Ada-KV's share of an even budget that every head keeps


class ExpectedAttention(Policy):
    """Keeps what future queries are expected to attend to, weighted by what would come of it.

    Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution (Devoto et al.,
    2025), Eq. 6 to 9. Queries before RoPE are taken for Gaussian with the prompt's mean and covariance, RoPE for its
    mean over the next `n_future` positions; then attention to a key is known in closed form. As in KVPress, the value's
    own norm stands for that of its projection, and the sinks are kept and left out of the softmax. `head_adaptive`
    shares the budget of a layer among its heads as AdaKV does.
    """

    name = "expected_attention"
    summary = "keeps what future queries are expected to attend to (Devoto et al., 2025)"

    def __init__(
        self, n_future: int = 512, epsilon: float = 0.02, n_sink: int = 4, head_adaptive: bool = False
    ) -> None:
        if n_future < 1 or epsilon < 0 or n_sink < 0:
            raise InputError("n_future must be at least 1, epsilon and n_sink not negative")
        self.n_future = n_future
        self.epsilon = epsilon
        self.n_sink = n_sink
        self.ragged = head_adaptive
        self.needs = Needs(query_statistics=True)

    def score(self, layer: LayerView) -> FloatArray:
        mean, covariance = layer.query_statistics
        rotation = mean_rotation(layer.rotation, layer.n_tokens, self.n_future, layer.keys.shape[2])
        mean = mean @ rotation.T * layer.kq_scale
        covariance = rotation @ covariance @ rotation.T * layer.kq_scale**2
        scores = np.zeros(layer.positions.shape, dtype=np.float32)
        for head in range(len(scores)):
            first = int(np.searchsorted(layer.positions[head], self.n_sink))
            keys = layer.keys[head, first:]
            if len(keys) == 0:
                continue
            queries = range(head * layer.group, (head + 1) * layer.group)
            for q in queries:
                logits = keys @ mean[q].astype(np.float32)
                logits += np.einsum("nd,nd->n", keys @ covariance[q].astype(np.float32), keys) / 2
                scores[head, first:] += softmax(logits) / layer.group
            scores[head, first:] += self.epsilon
            scores[head, first:] *= np.linalg.norm(layer.values[head, first:], axis=-1)
        scores[layer.positions < self.n_sink] = scores.max() + 1
        return scores

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        return across_heads(scores, keep, always, GUARDED)
