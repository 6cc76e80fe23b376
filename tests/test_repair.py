"""The repair pass against section 3.4 of the paper, and against a direct one that judges after every swap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_common import FAST, available, clustered, comparable, protected, repair_cases, sim_matrix

from twinkv_edge.errors import InputError
from twinkv_edge.repair import Repair, repair


def twins_of(keys, tau, window, position):
    """bool [n, n]: sim >= tau outside the window."""
    return (np.nan_to_num(sim_matrix(keys), nan=-1.0) >= np.float32(tau)) & comparable(position, window)


def paper(keys, retained, tau, window, n_sink, n_recent, position):
    """Section 3.4, transcribed: Eq. 4, orphans, donors, ranking by severity, m swaps."""
    sim = np.nan_to_num(sim_matrix(keys), nan=-1.0)
    n = len(keys)
    guard = protected(position, n_sink, n_recent)
    valid = np.isfinite(keys).all(axis=1) & (keys != 0).any(axis=1)
    far = comparable(position, window)
    b = [max([sim[i, j] for j in range(n) if retained[j] and far[i, j]], default=np.float32(-1)) for i in range(n)]
    orphans = sorted(
        (i for i in range(n) if not retained[i] and b[i] < np.float32(tau) and valid[i]),
        key=lambda i: (b[i], i),
    )
    donors = sorted(
        (j for j in range(n) if retained[j] and not guard[j] and b[j] >= np.float32(tau)),
        key=lambda j: (-b[j], j),
    )
    m = min(len(orphans), len(donors))
    out = retained.copy()
    out[donors[:m]] = False
    out[orphans[:m]] = True
    return out, m, orphans, donors


def consistent(keys, retained, tau, window, n_sink, n_recent, position):
    """One swap at a time, everything judged anew before each."""
    twin = twins_of(keys, tau, window, position)
    guard = protected(position, n_sink, n_recent)
    _, _, orphans, _ = paper(keys, retained, tau, window, n_sink, n_recent, position)
    now, evicted, swaps = retained.copy(), [], 0
    for orphan in orphans:
        if (twin[orphan] & now).any():
            continue  # a twin of it was just admitted
        for donor in np.flatnonzero(now & ~guard):
            rest = now.copy()
            rest[donor] = False
            if all((twin[e] & rest).any() for e in [*evicted, donor]):
                now = rest
                now[orphan] = True
                evicted.append(donor)
                swaps += 1
                break
        else:
            break
    return now, swaps


@st.composite
def cases(draw):
    _, keys, retained, protection, position = draw(repair_cases())
    options = {
        "tau": draw(st.sampled_from([0.5, 0.8, 0.95, 1.0])),
        **protection,
    }
    return keys, retained, options, position


def arguments(options, position):
    return options["tau"], options["local_window"], options["n_sink"], options["n_recent"], position


@settings(max_examples=150, deadline=None)
@given(cases())
def test_paper_is_section_3_4(case):
    keys, retained, options, position = case
    expected, m, orphans, donors = paper(keys, retained, *arguments(options, position))
    for backend in ("native", "numpy"):
        got = repair(keys, retained, **options, mode="paper", positions=position, backend=backend)
        np.testing.assert_array_equal(got.retained, expected)
        assert (got.n_swaps, got.n_orphans, got.n_donors, got.backend) == (
            m,
            len(orphans),
            len(donors),
            backend,
        )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_consistent_is_one_swap_at_a_time(case):
    keys, retained, options, position = case
    expected, swaps = consistent(keys, retained, *arguments(options, position))
    for backend in ("native", "numpy"):
        got = repair(keys, retained, **options, mode="consistent", positions=position, backend=backend)
        np.testing.assert_array_equal(got.retained, expected)
        assert got.n_swaps == swaps


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(["paper", "consistent"]))
def test_what_every_repair_keeps(case, mode):
    keys, retained, options, position = case
    before = keys.copy(), retained.copy()
    got = repair(keys, retained, **options, mode=mode, positions=position, backend="native")
    assert got.retained.sum() == retained.sum()
    assert got.retained is not retained
    np.testing.assert_array_equal(keys, before[0])
    np.testing.assert_array_equal(retained, before[1])
    evicted, admitted = retained & ~got.retained, got.retained & ~retained
    assert evicted.sum() == admitted.sum() == got.n_swaps <= min(got.n_orphans, got.n_donors)
    assert not (evicted & protected(position, options["n_sink"], options["n_recent"])).any()
    assert np.isfinite(keys[admitted]).all()
    assert (keys[admitted] != 0).any(axis=1).all()
    if mode == "consistent":
        twin = twins_of(keys, options["tau"], options["local_window"], position)
        assert (twin[evicted] & got.retained).any(axis=1).all()  # no last copy is evicted
        assert not twin[np.ix_(admitted, admitted)].any()  # nor are two copies admitted


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("mode", ["paper", "consistent"])
def test_batches_and_backends_agree(backend, mode):
    rng = np.random.default_rng(7)
    keys = np.stack([clustered(rng, 500, 32, clusters=40, noise=0.4) for _ in range(6)]).reshape(2, 3, 500, 32)
    retained = rng.random((2, 3, 500)) < 0.4
    expected = repair(keys, retained, tau=0.8, mode=mode, backend="numpy")
    for n_threads in (1, 2, 5):
        got = repair(keys, retained, tau=0.8, mode=mode, backend=backend, n_threads=n_threads)
        np.testing.assert_array_equal(got.retained, expected.retained)
        for name in ("n_swaps", "n_orphans", "n_donors"):
            assert getattr(got, name).shape == (2, 3)
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert (expected.n_swaps > 0).all()


@pytest.mark.parametrize("backend", available("numpy", "native", "numba"))
@pytest.mark.parametrize("mode", ["paper", "consistent"])
def test_nothing_to_swap_changes_nothing(backend, mode):
    keys = np.eye(40, dtype=np.float32)  # no two tokens are alike: orphans, but no donors
    retained = np.arange(40) % 2 == 0
    got = repair(keys, retained, tau=0.8, local_window=0, n_sink=0, n_recent=0, mode=mode, backend=backend)
    assert isinstance(got, Repair)
    assert (got.n_swaps, got.n_orphans, got.n_donors) == (0, 20, 0)
    np.testing.assert_array_equal(got.retained, retained)
    same = np.ones((40, 3), np.float32)  # all alike: donors, but no orphans
    got = repair(same, retained, tau=0.8, local_window=0, n_sink=0, n_recent=0, mode=mode, backend=backend)
    assert (got.n_swaps, got.n_orphans, got.n_donors) == (0, 0, 20)


@pytest.mark.parametrize("backend", available("numpy", "native", "numba"))
def test_newest_copy_stays_and_one_orphan_of_two_twins_comes_in(backend):
    e = np.eye(4, dtype=np.float32)
    keys = np.stack([e[0], e[1], e[0], e[2], e[2], e[0]])  # kept: 0, 1, 2 and 5; the orphans 3 and 4 are twins
    retained = np.array([1, 1, 1, 0, 0, 1], bool)
    options = {"tau": 0.9, "local_window": 0, "n_sink": 0, "n_recent": 0, "backend": backend}
    got = repair(keys, retained, mode="consistent", **options)
    np.testing.assert_array_equal(got.retained, [0, 1, 1, 1, 0, 1])
    got = repair(keys, retained, mode="paper", **options)
    np.testing.assert_array_equal(got.retained, [0, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("mode", ["paper", "consistent"])
def test_positions_move_window_and_protection(mode):
    keys = np.ones((6, 3), np.float32)
    keys[3] = [1, -1, 0]
    retained = np.array([1, 1, 1, 0, 1, 1], bool)
    position = np.array([0, 40, 41, 60, 90, 100], np.int32)
    got = repair(keys, retained, tau=0.9, local_window=32, n_sink=4, n_recent=20, mode=mode, positions=position)
    # 0 is a sink, 90 and 100 are recent: 40 and 41 may go; the earlier does
    np.testing.assert_array_equal(got.retained, [1, 0, 1, 1, 1, 1])
    got = repair(keys, retained, tau=0.9, local_window=100, n_sink=0, n_recent=0, mode=mode, positions=position)
    assert (got.n_swaps, got.n_donors, got.n_orphans) == (0, 0, 1)


@pytest.mark.parametrize("backend", available("numpy", "native", "numba"))
def test_empty(backend):
    got = repair(np.zeros((0, 4), np.float32), np.zeros(0, bool), tau=0.9, backend=backend)
    assert (got.retained.shape, got.n_swaps) == ((0,), 0)
    got = repair(np.zeros((0, 9, 4), np.float32), np.zeros((0, 9), bool), tau=0.9, backend=backend)
    assert (got.retained.shape, got.n_swaps.shape) == ((0, 9), (0,))


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "greedy"},
        {"tau": float("nan")},
        {"tau": -1.0},
        {"n_sink": -1},
        {"n_recent": -3},
        {"local_window": -1},
        {"positions": np.array([3, 2, 1, 0])},
        {"retained": np.ones(3, bool)},
        {"retained": np.ones(4, np.float32)},
        {"n_threads": 0},
    ],
)
def test_bad_input_is_refused(bad):
    arguments = {"keys": np.ones((4, 2), np.float32), "retained": np.ones(4, bool), "tau": 0.9} | bad
    with pytest.raises(InputError):
        repair(**arguments)
