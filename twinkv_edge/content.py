"""What a token holds for attention, as one vector: whether two tokens' vectors are alike says whether one can stand in
for the other. It is what the repair by coverage compares.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

VALUE_SCALE = 0.35  # of values beside keys, both at a mean square of 1 (docs/repair.md: what was tried)


def content(keys: FloatArray, values: FloatArray) -> tuple[npt.NDArray[np.float16], FloatArray]:
    """Keys and values side by side, and how much each value matters.

    Weights of attention add up to 1, so what all values of a head have in common is delivered whatever is kept: values
    count as far as they differ from the head's mean. Keys and values are brought to one scale, head by head.

    Args:
        keys: float32 [H, n, d], finite; with RoPE taken back, for what they say to count and not where they stand.
        values: float32 [H, n, d_v], finite.

    Returns:
        float16 [H, n, d + d_v], to be compared by direction; and float32 [H, n], the norms of the values less their
        mean: what an error in the weight of that token costs.
    """
    n_heads, n, d = keys.shape
    vectors = np.empty((n_heads, n, d + values.shape[-1]), dtype=np.float16)
    weights = np.empty((n_heads, n), dtype=np.float32)
    for head in range(n_heads if n else 0):
        own = values[head] - np.full(n, 1 / n, np.float32) @ values[head]
        squares = np.einsum("nd,nd->n", own, own)
        weights[head] = np.sqrt(squares)
        vectors[head, :, :d] = keys[head] * np.float32(1 / _size(np.einsum("nd,nd->n", keys[head], keys[head])))
        vectors[head, :, d:] = own * np.float32(VALUE_SCALE / _size(squares))
    return vectors, weights


def _size(squares: FloatArray) -> float:
    """Root mean square of rows' norms, of which these are the squares: a number above 0."""
    return math.sqrt(squares.mean(dtype=np.float64)) or 1.0
