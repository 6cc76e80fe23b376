from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Policy


class KeyDiff(Policy):
    """Keeps keys that point away from the mean direction of all keys.

    KeyDiff: Key Similarity-Based KV Cache Eviction (Park et al., 2025).
    """

    name = "keydiff"
    summary = "keeps keys that differ from the mean key (Park et al., 2025)"

    def score(self, layer: LayerView) -> FloatArray:
        unit = layer.keys / np.maximum(np.linalg.norm(layer.keys, axis=-1, keepdims=True), 1e-12)
        anchor = unit.mean(axis=1, keepdims=True)
        anchor /= np.maximum(np.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return np.asarray(-np.einsum("hnd,hd->hn", unit, anchor[:, 0]), dtype=np.float32)
