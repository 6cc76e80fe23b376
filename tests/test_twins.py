"""twin_counts and best_twin: every backend against the formulas, and what bad input gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_common import FAST, available, clustered, comparable, sim_matrix

from twinkv_edge import twins
from twinkv_edge.errors import InputError
from twinkv_edge.twins import best_twin, invalid_keys, twin_counts

ALL = [*available("numpy"), *FAST]


def expected_counts(keys, tau, window, position=None):
    position = np.arange(len(keys)) if position is None else position
    return np.sum((sim_matrix(keys) > np.float32(tau)) & comparable(position, window), axis=1)


def expected_best(keys, retained, window, position=None):
    position = np.arange(len(keys)) if position is None else position
    sim = np.nan_to_num(sim_matrix(keys), nan=-1.0)
    return np.where(comparable(position, window) & retained[None, :], sim, np.float32(-1)).max(axis=1, initial=-1.0)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("window", [0, 5, 32, 400])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (17, 3), (50, 31), (131, 64), (300, 80)])
def test_agrees_with_the_formulas(backend, n, d, window):
    rng = np.random.default_rng(n * d + window)
    keys = clustered(rng, n, d)
    retained = rng.random(n) < 0.5
    for tau in (-0.25, 0.6, 0.9):
        np.testing.assert_array_equal(
            twin_counts(keys, tau, window, backend=backend), expected_counts(keys, tau, window)
        )
    np.testing.assert_array_equal(
        best_twin(keys, retained, window, backend=backend), expected_best(keys, retained, window)
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_native_agrees_with_the_formulas_on_anything(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n, d = data.draw(st.integers(0, 90)), data.draw(st.integers(1, 70))
    keys = clustered(rng, n, d, clusters=data.draw(st.integers(1, 5)), noise=data.draw(st.floats(0, 2)))
    for _ in range(data.draw(st.integers(0, 4))):
        if n:
            keys[rng.integers(n)] = data.draw(st.sampled_from([0.0, np.nan, np.inf, 1e-45, 3e38]))
    position = np.sort(rng.choice(4 * n + 1, n, replace=False)).astype(np.int32)
    retained = rng.random(n) < data.draw(st.floats(0, 1))
    tau = data.draw(st.floats(-0.875, 1.0, width=32))
    window = data.draw(st.integers(0, 2 * n + 2))
    got = twin_counts(keys, tau, window, positions=position, backend="native", n_threads=2)
    np.testing.assert_array_equal(got, expected_counts(keys, tau, window, position))
    got = best_twin(keys, retained, window, positions=position, backend="native", n_threads=2)
    np.testing.assert_array_equal(got, expected_best(keys, retained, window, position))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_batches_of_strided_keys(backend, dtype):
    rng = np.random.default_rng(3)
    cells = np.stack([clustered(rng, 90, 16).astype(dtype) for _ in range(6)]).reshape(2, 3, 90, 16)
    keys = np.ascontiguousarray(cells.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # [L, H, n, d] seen in [L, n, H, d]
    retained = rng.random((2, 3, 90)) < 0.4
    position = np.sort(rng.permuted(np.tile(np.arange(200), (6, 1)), axis=1)[:, :90], axis=1).reshape(2, 3, 90)
    counts = twin_counts(keys, 0.8, 10, positions=position, backend=backend)
    best = best_twin(keys, retained, 10, positions=position, backend=backend)
    assert counts.dtype == np.int32
    assert best.dtype == np.float32
    assert counts.max() > 0
    for i in np.ndindex(2, 3):
        plain = cells[i].astype(np.float32)
        np.testing.assert_array_equal(counts[i], expected_counts(plain, 0.8, 10, position[i]))
        np.testing.assert_array_equal(best[i], expected_best(plain, retained[i], 10, position[i]))


@pytest.mark.parametrize("backend", ALL)
def test_exact_duplicates_at_tau_are_not_above_it(backend):
    rng = np.random.default_rng(0)
    keys = clustered(rng, 60, 24)
    keys[40:] = keys[:20]
    sim = sim_matrix(keys)
    for i, j in [(0, 40), (3, 50), (10, 11)]:
        tau = float(sim[i, j])
        if tau <= 1:
            np.testing.assert_array_equal(twin_counts(keys, tau, 0, backend=backend), expected_counts(keys, tau, 0))


@pytest.mark.parametrize("backend", ALL)
def test_keys_without_direction_have_no_twins(backend):
    keys = clustered(np.random.default_rng(1), 80, 8, clusters=1, noise=0.1)
    keys[3], keys[40, 2], keys[41, 0], keys[70] = 0, np.nan, np.inf, 0
    bad = [3, 40, 41, 70]
    counts = twin_counts(keys, -0.9, 0, backend=backend)
    best = best_twin(keys, np.ones(80, bool), 0, backend=backend)
    assert np.flatnonzero(invalid_keys(keys)).tolist() == bad
    assert (counts[bad] == 0).all()
    assert (best[bad] == -1).all()
    assert (np.delete(counts, bad) == 75).all()
    assert np.isfinite(best).all()


@pytest.mark.parametrize("backend", FAST)
def test_threads_do_not_change_results(backend):
    rng = np.random.default_rng(5)
    keys = clustered(rng, 700, 64)
    retained = rng.random(700) < 0.5
    counts = [twin_counts(keys, 0.8, backend=backend, n_threads=t) for t in (1, 2, 3, 8)]
    best = [best_twin(keys, retained, backend=backend, n_threads=t) for t in (1, 2, 3, 8)]
    for a, b in zip(counts[1:], best[1:], strict=True):
        np.testing.assert_array_equal(a, counts[0])
        np.testing.assert_array_equal(b, best[0])


@pytest.mark.parametrize("backend", ALL)
def test_nothing_to_do(backend):
    empty = np.zeros((0, 8), np.float32)
    assert twin_counts(empty, 0.9, backend=backend).shape == (0,)
    assert best_twin(empty, np.zeros(0, bool), backend=backend).shape == (0,)
    assert twin_counts(np.zeros((0, 5, 8), np.float32), 0.9, backend=backend).shape == (0, 5)
    keys = clustered(np.random.default_rng(2), 20, 8)
    assert (best_twin(keys, np.zeros(20, bool), 0, backend=backend) == -1).all()
    assert (twin_counts(keys, -0.5, 19, backend=backend) == 0).all()


GOOD = np.ones((6, 4), np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: twin_counts(GOOD.astype(np.float64), 0.9),
        lambda: twin_counts(GOOD[0], 0.9),
        lambda: twin_counts(np.ones((6, 0), np.float32), 0.9),
        lambda: twin_counts(GOOD, np.nan),
        lambda: twin_counts(GOOD, -1),
        lambda: twin_counts(GOOD, -1 + 1e-12),
        lambda: twin_counts(GOOD, 1.01),
        lambda: twin_counts(GOOD, 0.9, -1),
        lambda: twin_counts(GOOD, 0.9, 1.5),
        lambda: twin_counts(GOOD, 0.9, n_threads=0),
        lambda: twin_counts(GOOD, 0.9, backend="fpga"),
        lambda: twin_counts(GOOD, 0.9, positions=[0, 1, 2, 2, 3, 4]),
        lambda: twin_counts(GOOD, 0.9, positions=[5, 4, 3, 2, 1, 0]),
        lambda: twin_counts(GOOD, 0.9, positions=np.arange(5)),
        lambda: twin_counts(GOOD, 0.9, positions=np.arange(6.0)),
        lambda: twin_counts(GOOD, 0.9, positions=np.arange(6) + 2**31),
        lambda: best_twin(GOOD, np.ones(5, bool)),
        lambda: best_twin(GOOD, np.ones(6, np.uint8)),
        lambda: best_twin(np.ones((2, 6, 4), np.float32), np.ones(6, bool)),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(InputError):
        call()


def test_auto_takes_the_first_that_runs(monkeypatch):
    assert twins.active_backend() == "native"
    monkeypatch.setattr("twinkv_edge.backends.native.reason", "not built")
    monkeypatch.setattr(twins, "_warned", set())
    with pytest.warns(RuntimeWarning, match="not built"):
        assert twins.active_backend() == "numba"
    with pytest.raises(InputError, match="not built"):
        twin_counts(GOOD, 0.9, backend="native")
