from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Needs, Policy


class ObservedAttention(Policy):
    """Keeps keys that received the most attention per query that could see them: H2O without its favour for old tokens.

    The form KVPress calls observed attention, from H2O (Zhang et al., 2023).
    """

    name = "observed_attention"
    summary = "keeps keys that received most attention per query that saw them (KVPress's H2O)"
    needs = Needs(attention=True)

    def score(self, layer: LayerView) -> FloatArray:
        seen_by = (layer.n_tokens - layer.positions) * layer.group
        return np.asarray(layer.attention / seen_by, dtype=np.float32)
