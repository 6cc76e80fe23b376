from __future__ import annotations

from .base import FloatArray, LayerView, Needs, Policy


class H2O(Policy):
    """Keeps heavy hitters: keys that received the most attention, summed over every query so far.

    H2O: Heavy-Hitter Oracle for Efficient Generative Inference (Zhang et al., 2023). Summed while the prompt is
    evaluated, in O(n) memory per head. The paper gives half of the budget to recent tokens; here `n_recent` says how
    many are kept.
    """

    name = "h2o"
    summary = "keeps keys that received most attention from all queries (Zhang et al., 2023)"
    needs = Needs(attention=True)

    def score(self, layer: LayerView) -> FloatArray:
        return layer.attention
