from __future__ import annotations

import numpy as np

from ..twins import twin_counts
from .base import FloatArray, LayerView, Policy


class TwinKV(Policy):
    """Keeps tokens whose keys have the fewest near-duplicates: the redundancy score standing alone.

    TwinKV (papers/twinkv), Eq. 2 and 3: s_i = -r_i / n.
    """

    name = "twinkv"
    summary = "keeps keys with the fewest near-duplicates (TwinKV, Eq. 3)"

    def __init__(self, tau: float = 0.9, local_window: int = 32) -> None:
        self.tau = tau
        self.local_window = local_window

    def score(self, layer: LayerView) -> FloatArray:
        keys = layer.compared_keys
        counts = twin_counts(keys, self.tau, self.local_window, positions=layer.positions, n_threads=layer.n_threads)
        return np.asarray(-counts / max(1, keys.shape[1]), dtype=np.float32)
