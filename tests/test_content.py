"""What the repair by coverage compares: keys and values side by side, whatever their scale and what values share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkv_edge as tk
from twinkv_edge import pipeline, views
from twinkv_edge.content import BALANCE, BALANCE_QK_NORM, Balance, balance, content


def rows(seed: int, n: int = 50, d: int = 12) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, n, d)).astype(np.float32)


def defined(keys: Any, values: Any) -> tuple[Any, Any]:
    """The definition in float64: vectors [H, n, d + d_v] and weights [H, n]."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    own = values - values.mean(axis=1, keepdims=True)
    size = [np.sqrt((part**2).sum(-1).mean(-1))[:, None, None] for part in (keys, own)]
    size = [np.where(s > 0, s, 1) for s in size]
    return np.concatenate([keys / size[0], BALANCE.value_scale * own / size[1]], axis=-1), np.linalg.norm(own, axis=-1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(1, 4),
    st.sampled_from([1, 2, 7, 255, 256, 257, 600]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_what_it_is(seed: int, n_heads: int, n: int, d: int, d_v: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    keys = (scale * rng.normal(size=(n_heads, n, d))).astype(np.float32)
    values = (scale * rng.normal(1, 1, size=(n_heads, n, d_v))).astype(np.float32)
    vectors, weights = content(keys, values)
    expected, costs = defined(keys, values)
    assert (vectors.dtype, vectors.shape, weights.dtype) == (np.float16, (n_heads, n, d + d_v), np.float32)
    if n > 1:  # the difference of one value from itself is rounding
        np.testing.assert_allclose(weights, costs, rtol=1e-3, atol=1e-5 * scale)
        np.testing.assert_allclose(vectors, expected, rtol=2e-3, atol=2e-3)
    for threads in (1, 3):
        again = content(keys, values, n_threads=threads)
        np.testing.assert_array_equal(again[0].view(np.uint16), vectors.view(np.uint16))
        np.testing.assert_array_equal(again[1], weights)


def test_arrays_need_not_be_contiguous() -> None:
    keys, values = rows(0), rows(1, d=7)
    turned = [np.asfortranarray(each) for each in (keys, values)]
    np.testing.assert_array_equal(content(*turned)[0], content(keys, values)[0])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="of the same heads and tokens"):
        content(rows(0, 5), rows(1, 6))
    with pytest.raises(tk.InputError, match="no keys and values to put side by side"):
        content(rows(0, 5, 0), rows(1, 5))
    with pytest.raises(tk.InputError, match="value_scale must be finite"):
        content(rows(0, 5), rows(1, 5), -1.0)


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


@pytest.mark.parametrize(
    ("model", "index", "weighed"), [("evaluated", 12, BALANCE), ("evaluated_qwen3", 1, BALANCE_QK_NORM)]
)
def test_compress_hands_it_to_the_repair(
    model: str, index: int, weighed: Balance, request: pytest.FixtureRequest
) -> None:
    kv = request.getfixturevalue(model).kv
    alone = tk.Compression(policy="knorm", ratio=0.5, repair="none")
    plan = pipeline.make_plan(kv, tk.Compression(policy="knorm", ratio=0.5), 0.9)
    part = views.parts(kv, index)[0]
    assert balance(part.view) == weighed
    scores = pipeline.make_policy(alone, 0.9, kv.facts.path).score(part.view)
    before = pipeline.make_plan(kv, alone, 0.9).retained[index]
    vectors, weight = content(part.view.unrotated_keys, part.view.values, weighed.value_scale)
    options: dict[str, Any] = {"mode": "coverage", "priority": scores, "weight": weight}
    done = tk.repair(vectors, before, margin=weighed.margin, **options)
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
