"""Keys for the tests of the twin kernels, and the paper's formulas written down without regard for speed."""

from __future__ import annotations

import numpy as np
import pytest

from twinkv_edge import twins


def available(*names: str) -> list:
    """Test parameters for backends; those that cannot run here are skipped with their reason."""
    out = []
    for name in names:
        reason = twins.unavailable(name)
        marks = [] if reason is None else [pytest.mark.skip(reason=f"{name}: {reason}")]
        out.append(pytest.param(name, marks=marks))
    return out


FAST = available("native", "numba", "ggml", "cuda")


def clustered(rng: np.random.Generator, n: int, d: int, clusters: int = 8, noise: float = 0.5) -> np.ndarray:
    """Keys around a few directions, of any length: similarities on both sides of any tau. float32 [n, d]."""
    centers = rng.standard_normal((clusters, d)) + 0.5
    keys = centers[rng.integers(clusters, size=n)] + noise * rng.standard_normal((n, d))
    return (keys * rng.uniform(0.1, 30, (n, 1))).astype(np.float32)


def sim_matrix(keys: np.ndarray) -> np.ndarray:
    """Eq. 1 as this project defines it, float32 [n, n]; nan where a key has no direction."""
    unit = []
    for key in keys.astype(np.float32):
        square = 0.0
        for value in key.tolist():
            square += value * value
        norm = np.sqrt(square)
        unit.append(np.float32(key.astype(np.float64) / norm) if 0 < norm < np.inf else np.full(len(key), np.nan))
    unit = np.array(unit, np.float64).reshape(keys.shape)
    total = np.zeros((len(keys), len(keys)))
    for k in range(unit.shape[1]):
        total = total + np.outer(unit[:, k], unit[:, k])
    return total.astype(np.float32)


def comparable(position: np.ndarray, window: int) -> np.ndarray:
    """bool [n, n]: pairs outside the local window."""
    p = position.astype(np.int64)
    return np.abs(p[:, None] - p[None, :]) > window


def protected(position: np.ndarray, n_sink: int, n_recent: int) -> np.ndarray:
    """bool [n]."""
    p = position.astype(np.int64)
    return (p < n_sink) | (p > p[-1] - n_recent) if len(p) else np.zeros(0, bool)
