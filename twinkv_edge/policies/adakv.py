from __future__ import annotations

import os

import numpy as np

from ..errors import InputError
from .base import BoolArray, FloatArray, IntArray, LayerView, Policy


class AdaKV(Policy):
    """Ranks another policy's scores across the heads of a layer: heads that need more tokens keep more.

    Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation (Feng et al., 2024). Each head is guarded a share
    of the even budget.
    """

    name = "adakv"
    summary = "any policy's scores (base=snapkv), ranked across the heads of a layer (Feng et al., 2024)"
    ragged = True

    def __init__(self, base: Policy | str = "snapkv", guarded: float = 0.2) -> None:
        if not 0 <= guarded <= 1:
            raise InputError(f"guarded is {guarded}: give the share of its budget that every head keeps, 0 to 1")
        assert isinstance(base, Policy), "policies.create() makes the base"
        self.base = base
        self.guarded = guarded
        self.needs = base.needs

    def bind(self, model: str | os.PathLike[str]) -> None:
        self.base.bind(model)

    def score(self, layer: LayerView) -> FloatArray:
        return self.base.score(layer)

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        return across_heads(scores, keep, always, self.guarded)


def across_heads(scores: FloatArray, keep: int, always: BoolArray, guarded: float) -> IntArray:
    """How many of the best keep * H tokens of a layer fall to each head, int32 [H].

    Args:
        scores: float32 [H, n].
        keep: Tokens per head on average.
        always: bool [H, n] tokens that come first.
        guarded: Share of `keep` that each head gets in any case: its best tokens come first, too.
    """
    n_heads, n = scores.shape
    ranked = np.where(always, np.inf, scores.astype(np.float64))
    best = np.argsort(-ranked, axis=-1, kind="stable")[:, : int(keep * guarded)]
    np.put_along_axis(ranked, best, np.inf, axis=-1)
    chosen = np.argsort(-ranked, axis=None, kind="stable")[: keep * n_heads]
    return np.bincount(chosen // n, minlength=n_heads).astype(np.int32)
