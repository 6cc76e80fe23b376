"""The repair by coverage against a direct one that looks everything up again before each swap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_common import FAST, available, clustered, comparable, protected, repair_cases, sim_matrix

from twinkv_edge.errors import InputError
from twinkv_edge.repair import SHARE, repair


def direct(keys, retained, options, position, priority, weight):
    """One swap at a time: the token outside that lacks most, and the first donor that is covered better without it."""
    window = options["local_window"]
    sim = np.where(comparable(position, window), np.nan_to_num(sim_matrix(keys), nan=-1.0), np.float32(-1))
    valid = np.isfinite(keys).all(axis=1) & (keys != 0).any(axis=1)
    guard = protected(position, options["n_sink"], options["n_recent"])

    def covered(i, by):
        return max([sim[i, j] for j in np.flatnonzero(by) if j != i], default=np.float32(-1))

    first = np.array([covered(i, retained) for i in range(len(keys))], np.float32)
    tokens = np.flatnonzero(retained & valid & ~guard)
    worth = np.arange(len(keys)) if priority is None else np.where(np.isnan(priority), -np.inf, priority)
    cost = np.ones(len(keys), np.float32) if weight is None else weight
    queue = sorted(tokens, key=lambda i: (worth[i], i))
    now, given, swaps = retained.copy(), retained.copy(), 0
    limit = math.floor(options["share"] * min(retained.sum(), (~retained).sum()))
    outside = set(np.flatnonzero(~retained & valid))
    while swaps < limit and outside:
        lack = {i: (np.float32(1) - max(first[i], covered(i, now & ~retained))) * cost[i] for i in outside}
        orphan = min(outside, key=lambda i: (-lack[i], i))
        if lack[orphan] <= 0:
            break
        need = max(first[orphan], covered(orphan, now & ~retained)) + np.float32(options["margin"])
        while queue and not (first[queue[0]] > need and covered(queue[0], given) > need):
            queue.pop(0)
        if not queue:
            break
        donor = queue.pop(0)
        given[donor] = now[donor] = False
        now[orphan] = True
        outside.discard(orphan)
        swaps += 1
    return now, swaps


@st.composite
def cases(draw):
    rng, keys, retained, protection, position = draw(repair_cases())
    n = len(keys)
    priority = draw(st.sampled_from([None, rng.normal(size=n), rng.integers(0, 3, n), np.full(n, np.nan)]))
    weight = draw(st.sampled_from([None, np.abs(rng.normal(size=n)), rng.integers(0, 3, n), np.zeros(n)]))
    options = {
        "share": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "margin": draw(st.sampled_from([0.0, 0.06, 0.3])),
        **protection,
    }
    ranking = [None if values is None else values.astype(np.float32) for values in (priority, weight)]
    return keys, retained, options, position, *ranking


@settings(max_examples=200, deadline=None)
@given(cases())
def test_one_swap_at_a_time(case):
    keys, retained, options, position, priority, weight = case
    before = keys.copy(), retained.copy()
    expected, swaps = direct(keys, retained, options, position, priority, weight)
    arguments = {"mode": "coverage", "positions": position, "priority": priority, "weight": weight, **options}
    for backend in ("native", "numpy"):
        got = repair(keys, retained, backend=backend, **arguments)
        np.testing.assert_array_equal(got.retained, expected)
        assert (got.n_swaps, got.backend) == (swaps, backend)
        assert got.n_swaps <= min(got.n_orphans, got.n_donors)
    np.testing.assert_array_equal(keys, before[0])
    np.testing.assert_array_equal(retained, before[1])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_it_keeps(case):
    keys, retained, options, position, priority, weight = case
    got = repair(keys, retained, mode="coverage", positions=position, priority=priority, weight=weight, **options)
    evicted, admitted = retained & ~got.retained, got.retained & ~retained
    assert evicted.sum() == admitted.sum() == got.n_swaps
    assert got.n_swaps <= options["share"] * min(retained.sum(), (~retained).sum())
    assert not (evicted & protected(position, options["n_sink"], options["n_recent"])).any()
    assert np.isfinite(keys[admitted]).all()
    assert (keys[admitted] != 0).any(axis=1).all()


@pytest.mark.parametrize("backend", FAST)
def test_batches_backends_and_threads_agree(backend):
    rng = np.random.default_rng(7)
    keys = np.stack([clustered(rng, 700, 48, clusters=60, noise=0.5) for _ in range(4)]).reshape(2, 2, 700, 48)
    retained = rng.random((2, 2, 700)) < 0.5
    options = {
        "mode": "coverage",
        "margin": 0.0,
        "priority": rng.normal(size=(2, 2, 700)).astype(np.float32),
        "weight": rng.random((2, 2, 700)).astype(np.float32),
    }
    expected = repair(keys, retained, **options, backend="numpy")
    for n_threads in (1, 2, 5):
        got = repair(keys, retained, **options, backend=backend, n_threads=n_threads)
        np.testing.assert_array_equal(got.retained, expected.retained)
        for name in ("n_swaps", "n_orphans", "n_donors"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert (expected.n_swaps > 30).all()
    assert (expected.n_swaps <= SHARE * np.minimum(retained.sum(axis=-1), (~retained).sum(axis=-1))).all()


@pytest.mark.parametrize("backend", available("numpy", "native", "numba"))
def test_a_lone_token_comes_in_for_the_copy_that_is_worth_least(backend):
    e = np.eye(4, dtype=np.float32)
    keys = np.stack([e[0], e[0], e[0], e[1], e[1], e[2]])  # kept: three copies; outside: two copies and a lone token
    retained = np.array([1, 1, 1, 0, 0, 0], bool)
    options = {"mode": "coverage", "local_window": 0, "n_sink": 0, "n_recent": 0, "share": 1.0, "backend": backend}
    # two may go and the last copy may not; of the twins outside one comes in
    got = repair(keys, retained, priority=np.array([2.0, 0, 1, 0, 0, 0]), **options)
    np.testing.assert_array_equal(got.retained, [1, 0, 0, 1, 0, 1])
    assert (got.n_swaps, got.n_orphans, got.n_donors) == (2, 3, 3)
    got = repair(keys, retained, **options)  # without priorities the newest copy stays
    np.testing.assert_array_equal(got.retained, [0, 0, 1, 1, 0, 1])
    got = repair(keys, retained, **{**options, "share": 0.5})
    assert got.n_swaps == 1
    got = repair(keys, retained, weight=np.array([1, 1, 1, 1, 1, 0.0]), **options)  # the lone token does not matter
    np.testing.assert_array_equal(got.retained, [0, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("backend", available("numpy", "native", "numba"))
def test_nothing_to_gain_changes_nothing(backend):
    retained = np.arange(40) % 2 == 0
    for keys in (np.eye(40, dtype=np.float32), np.ones((40, 3), np.float32)):  # all lone; all copies of each other
        got = repair(keys, retained, mode="coverage", local_window=0, n_sink=0, n_recent=0, backend=backend)
        assert got.n_swaps == 0
        np.testing.assert_array_equal(got.retained, retained)
    got = repair(np.zeros((0, 9, 4), np.float32), np.zeros((0, 9), bool), mode="coverage", backend=backend)
    assert (got.retained.shape, got.n_swaps.shape) == ((0, 9), (0,))


@pytest.mark.parametrize(
    "bad",
    [
        {"share": -0.1},
        {"share": 1.5},
        {"share": float("nan")},
        {"share": "half"},
        {"margin": -0.1},
        {"margin": float("nan")},
        {"weight": np.array([1, 1, 1, np.nan])},
        {"weight": np.array([1, 1, 1, -1.0])},
        {"weight": np.ones(3)},
        {"priority": np.ones(3)},
        {"priority": np.array(["a"] * 4)},
        {"mode": "paper"},  # needs tau
    ],
)
def test_bad_input_is_refused(bad):
    arguments = {"keys": np.ones((4, 2), np.float32), "retained": np.ones(4, bool), "mode": "coverage"} | bad
    with pytest.raises(InputError):
        repair(**arguments)
