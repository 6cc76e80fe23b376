from __future__ import annotations

import os

import numpy as np

from ..errors import InputError
from .base import BoolArray, FloatArray, IntArray, LayerView, Policy


class ChunkKV(Policy):
    """Keeps whole chunks of neighbouring tokens, those with the best mean of another policy's scores.

    ChunkKV: Semantic-Preserving KV Cache Compression (Liu et al., 2025). All heads of a layer keep the same chunks, as
    long as they hold the same tokens. A head keeps (1 - ratio) of the chunks, rounded down; chunks with protected
    tokens come first.
    """

    name = "chunkkv"
    summary = "whole chunks of 20 tokens by any policy's scores (base=snapkv; Liu et al., 2025)"
    ragged = True

    def __init__(self, base: Policy | str = "snapkv", chunk: int = 20, n_sink: int = 4, n_recent: int = 64) -> None:
        if chunk < 1:
            raise InputError(f"chunk is {chunk}: give 1 token or more")
        assert isinstance(base, Policy), "policies.create() makes the base"
        self.base = base
        self.chunk = chunk
        self.n_sink = n_sink
        self.n_recent = n_recent
        self.needs = base.needs

    def bind(self, model: str | os.PathLike[str]) -> None:
        self.base.bind(model)

    def score(self, layer: LayerView) -> FloatArray:
        scores = self.base.score(layer)
        if (layer.positions == layer.positions[0]).all():
            scores = np.broadcast_to(scores.mean(axis=0), scores.shape)
        starts = np.arange(0, scores.shape[1], self.chunk)
        lengths = np.diff([*starts, scores.shape[1]])
        means = np.add.reduceat(scores, starts, axis=1) / lengths
        first = (layer.positions < self.n_sink) | (layer.positions >= layer.n_tokens - self.n_recent)
        means[np.logical_or.reduceat(first, starts, axis=1)] = means.max() + 1
        return np.repeat(means, lengths, axis=1).astype(np.float32)

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        n_heads, n = scores.shape
        starts = np.arange(0, n, self.chunk)
        lengths = np.diff([*starts, n])
        n_chunks = max(1, len(starts) * keep // n)
        counts = np.empty(n_heads, dtype=np.int32)
        for head in range(n_heads):
            held = np.logical_or.reduceat(always[head], starts)
            order = np.argsort(-np.where(held, np.inf, scores[head, starts]), kind="stable")
            counts[head] = min(keep, lengths[order[:n_chunks]].sum())  # of a chunk longer than the budget, a part
        return np.asarray(np.maximum(counts, always.sum(axis=-1)), dtype=np.int32)
