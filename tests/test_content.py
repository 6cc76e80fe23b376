"""What the repair by coverage compares: keys and values side by side, whatever their scale and what values share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import twinkv_edge as tk
from twinkv_edge import pipeline, views
from twinkv_edge.content import VALUE_SCALE, content


def rows(seed: int, n: int = 50, d: int = 12) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, n, d)).astype(np.float32)


def test_what_it_is() -> None:
    keys, values = rows(0), rows(1, d=7)
    vectors, weights = content(keys, values)
    own = values - values.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, np.linalg.norm(own, axis=-1), rtol=1e-5)
    size = [np.sqrt((part.astype(np.float64) ** 2).sum(-1).mean(-1))[:, None, None] for part in (keys, own)]
    expected = np.concatenate([keys / size[0], VALUE_SCALE * own / size[1]], axis=-1)
    assert (vectors.dtype, vectors.shape, weights.dtype) == (np.float16, (3, 50, 19), np.float32)
    np.testing.assert_allclose(vectors, expected, atol=2e-3)


def test_scales_and_what_all_values_share_do_not_matter() -> None:
    keys, values = rows(0), rows(1)
    vectors, weights = content(keys, values)
    other, heavier = content(1000 * keys, 0.01 * values + 0.3)
    np.testing.assert_allclose(other.astype(np.float32), vectors.astype(np.float32), atol=2e-3)
    np.testing.assert_allclose(heavier, 0.01 * weights, rtol=1e-3)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_values_that_are_all_alike_weigh_nothing(n: int) -> None:
    vectors, weights = content(rows(0, n), np.full((3, n, 4), 7, np.float32))
    assert np.isfinite(vectors).all()
    assert (weights == 0).all()


def test_compress_hands_it_to_the_repair(evaluated: tk.CompressedLlama) -> None:
    kv, index = evaluated.kv, 12
    alone = tk.Compression(policy="knorm", ratio=0.5, repair="none")
    plan = pipeline.make_plan(kv, tk.Compression(policy="knorm", ratio=0.5), 0.9)
    part = views.parts(kv, index)[0]
    scores = pipeline.make_policy(alone, 0.9, kv.model).score(part.view)
    before = pipeline.make_plan(kv, alone, 0.9).retained[index]
    vectors, weight = content(part.view.unrotated_keys, part.view.values)
    done = tk.repair(vectors, before, mode="coverage", priority=scores, weight=weight)
    np.testing.assert_array_equal(plan.retained[index], done.retained)
    assert (done.n_swaps > 0).all()


def test_a_value_that_is_not_finite_is_refused(evaluated: tk.CompressedLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    values = evaluated.kv.values

    def broken(index: int) -> Any:
        found = values(index)
        found[5, 1, 0] = np.inf
        return found

    monkeypatch.setattr(evaluated.kv, "values", broken)
    before = evaluated.kv.n_cells
    with pytest.raises(tk.CacheStateError, match=r"1 values of layer 0 are not finite \(the first: head 1, token 5\)"):
        evaluated.compress(policy="knorm", ratio=0.5)
    assert evaluated.kv.n_cells == before
    assert len(pipeline.make_plan(evaluated.kv, tk.Compression(policy="knorm", repair="paper"), 0.9).retained) == 30
