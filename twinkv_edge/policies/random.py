from __future__ import annotations

import numpy as np

from .base import FloatArray, LayerView, Policy


class Random(Policy):
    """Uniformly random scores, the same for the same seed: the control every policy must beat."""

    name = "random"
    summary = "random tokens, seeded: the control"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score(self, layer: LayerView) -> FloatArray:
        rng = np.random.default_rng([self.seed, layer.index])
        return rng.random(layer.positions.shape, dtype=np.float32)
