"""Keys for the tests of the twin kernels, and the paper's formulas written down without regard for speed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

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


@st.composite
def repair_cases(draw):
    """What repairs are tried on: rng, keys [n, d], retained [n], window and protected tokens, positions [n]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(1, 60)), draw(st.integers(1, 24))
    keys = clustered(rng, n, d, clusters=draw(st.integers(1, 6)), noise=draw(st.floats(0, 1.5)))
    for _ in range(draw(st.integers(0, 3))):
        keys[rng.integers(n)] = draw(st.sampled_from([0.0, np.nan, np.inf]))
    if draw(st.booleans()):
        keys[n // 2 :] = keys[: n - n // 2]  # exact duplicates: ties everywhere
    position = np.sort(rng.choice(3 * n, n, replace=False)).astype(np.int32)
    retained = rng.random(n) < draw(st.floats(0, 1))
    protection = {
        "local_window": draw(st.integers(0, n)),
        "n_sink": draw(st.integers(0, 6)),
        "n_recent": draw(st.integers(0, 10)),
    }
    return rng, keys, retained, protection, position
