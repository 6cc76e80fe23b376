from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Policy


class KNorm(Policy):
    """Keys of small norm draw attention, so large ones go first.

    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024).
    """

    name = "knorm"
    summary = "keeps keys of small L2 norm (Devoto et al., 2024)"

    def score(self, layer: LayerView) -> FloatArray:
        return np.asarray(-np.linalg.norm(layer.keys, axis=-1), dtype=np.float32)
