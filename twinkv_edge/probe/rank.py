"""Spearman's rank correlation and its p-value, by permutation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import InputError


def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs. [n] -> float64 [n]."""
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: npt.NDArray[np.float64] = last - (counts - 1) / 2
    return mean[inverse.reshape(-1)]


def spearman(x: npt.ArrayLike, y: npt.ArrayLike, *, permutations: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """rho, and the two-sided p: the share of shuffles that correlate at least as strongly, counting the data itself.

    No table and no normal approximation is needed, so it holds for few points and for ties.

    Raises:
        InputError: Fewer than three points, sizes differ, values are not finite, or all of x or of y are equal.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or a.size < 3:
        raise InputError(f"a rank correlation needs at least 3 pairs of numbers, not {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("a rank correlation needs finite numbers")
    a, b = ranks(a), ranks(b)
    a, b = a - a.mean(), b - b.mean()
    length = float(np.sqrt((a @ a) * (b @ b)))
    if length == 0:
        raise InputError("a rank correlation needs values that differ: all of one side are equal")
    rho = float(a @ b) / length
    rng = np.random.default_rng(seed)
    beyond = 1
    for _ in range(permutations):
        beyond += abs(float(a @ rng.permutation(b))) / length >= abs(rho) - 1e-12
    return rho, beyond / (1 + permutations)
