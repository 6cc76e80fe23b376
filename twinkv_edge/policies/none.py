from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Policy


class NoEviction(Policy):
    """Keeps everything, whatever the ratio: the full cache to compare with."""

    name = "none"
    summary = "keeps the whole cache: the ceiling"

    def score(self, layer: LayerView) -> FloatArray:
        return np.zeros(layer.positions.shape, dtype=np.float32)
