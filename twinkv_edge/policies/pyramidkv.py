from __future__ import annotations

import numpy as np

from ..errors import InputError
from .base import BoolArray, FloatArray, IntArray, LayerView
from .snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV's scores with a budget that falls from the first layer to the last: attention narrows on the way up.

    PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling (Cai et al., 2024), with KVPress's
    rule where the budget is small: then all layers keep the same.
    """

    name = "pyramidkv"
    summary = "snapkv, with budgets falling from the first layer to the last (Cai et al., 2024)"
    ragged = True

    def __init__(
        self, window: int = 64, kernel: int = 5, beta: float = 20, n_sink: int = 4, n_recent: int = 64
    ) -> None:
        super().__init__(window, kernel)
        if beta < 1:
            raise InputError(f"beta is {beta}: give 1 or more, how many times narrower the last layer is")
        self.beta = beta
        self.protected = n_sink + n_recent

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        n_heads, n = scores.shape
        of_layers = layer_budgets(n, keep, layer.n_layers, self.window, self.beta, min(n, self.protected))
        return np.full(n_heads, of_layers[layer.index], dtype=np.int32)


def layer_budgets(n: int, keep: int, n_layers: int, window: int, beta: float, least: int = 0) -> IntArray:
    """Tokens each layer keeps, int32 [n_layers], `keep` on average and never fewer than `least` (at most `keep`).

    The budget beyond the window falls linearly by a factor that `beta` sets; no layer keeps more than n - window. Where
    the last layer would not even keep the window, all keep the same.
    """
    total = keep + window
    last = (total - window) / beta
    first = 2 * (total - window) - last
    if first >= n - window:
        first, last = n - window, 2 * (total - window) - (n - window)
    if n_layers == 1 or not n >= first >= last >= window:
        return np.full(n_layers, keep, dtype=np.int32)
    falling = first - np.arange(n_layers) * (first - last) / (n_layers - 1)
    return fit(np.rint(falling).astype(np.int32), keep * n_layers, min(least, keep), n)


def fit(budgets: IntArray, total: int, least: int, most: int) -> IntArray:
    """Budgets within [least, most] that add up to `total`: the largest give or take what is over or missing."""
    budgets = np.clip(budgets, least, most).astype(np.int32)
    while difference := int(total - budgets.sum()):
        step = 1 if difference > 0 else -1
        free = np.flatnonzero(budgets < most) if step > 0 else np.flatnonzero(budgets > least)
        largest = free[np.argsort(-budgets[free], kind="stable")][: abs(difference)]
        budgets[largest] += step
    return budgets
