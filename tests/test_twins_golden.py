"""Twin counts against those a peer computed in float32 (tests/data; KVPress keys of a small random Qwen3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twins_common import available

from twinkv_edge.twins import twin_counts

GOLDEN = Path(__file__).parent / "data" / "qwen3-tiny_kvpress.npz"


@pytest.mark.parametrize("backend", available("native", "numba", "numpy", "ggml", "cuda"))
@pytest.mark.parametrize("tau", [0.85, 0.90])
def test_counts_of_the_golden_keys(backend, tau):
    with np.load(GOLDEN) as golden:
        keys, expected = golden["keys"], golden[f"twin_counts_t{round(100 * tau)}_w32"]
    counts = twin_counts(keys, tau, 32, backend=backend)
    assert counts.shape == expected.shape
    assert (expected.sum() > 10) == (tau == 0.85)  # its random weights make few twins, at 0.90 none
    # the file holds its keys as float16, its counts are of float32 ones: a pair at tau may change sides
    assert np.mean(counts == expected) >= 0.995
    assert np.abs(counts - expected).max() <= 2
