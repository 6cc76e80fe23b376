"""Settings, budgets, selection and votes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import twinkv_edge as tk
from twinkv_edge import select
from twinkv_edge.errors import InputError


@given(st.integers(0, 99), st.integers(0, 100_000))
def test_budget_is_the_exact_ceiling(percent: int, n: int) -> None:
    cfg = tk.Compression(ratio=percent / 100, n_sink=0, n_recent=0)
    exact = (1 - Fraction(percent, 100)) * n
    assert cfg.budget(n) == -(-exact.numerator // exact.denominator)


def test_budget_where_floats_slip() -> None:
    # 0.9 * 10 is 9.000000000000002 when 1 - 0.1 is taken in floats: ceil would keep 10
    assert tk.Compression(ratio=0.1, n_sink=0, n_recent=0).budget(10) == 9
    assert tk.Compression(ratio=0.7, n_sink=0, n_recent=0).budget(10) == 3


def test_target_tokens_override_the_ratio() -> None:
    cfg = tk.Compression(target_tokens=100)
    assert cfg.budget(1000) == 100
    assert cfg.budget(80) == 80


def test_none_keeps_everything() -> None:
    assert tk.Compression(policy="none", ratio=0.9).budget(500) == 500


def test_budget_smaller_than_what_is_protected() -> None:
    with pytest.raises(InputError, match="smaller than the 68"):
        tk.Compression(ratio=0.9).budget(100)
    with pytest.raises(InputError):
        tk.Compression(target_tokens=10).budget(100)


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 1.0},
        {"ratio": -0.1},
        {"ratio": float("nan")},
        {"ratio": "0.5"},
        {"tau": float("inf")},
        {"tau": -1.0},
        {"repair": "maybe"},
        {"layout": "row"},
        {"key_space": "polar"},
        {"n_sink": -1},
        {"n_recent": 1.5},
        {"local_window": -3},
        {"target_tokens": 0},
    ],
)
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        tk.Compression(**settings)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.data())
def test_top_keeps_exactly_the_best(n: int, data: st.DataObject) -> None:
    scores = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)), dtype=np.float32)[None]
    always = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))[None]
    keep = data.draw(st.integers(int(always.sum()), n))
    retained = select.top(scores, keep, always)
    assert retained.sum() == keep
    assert (retained | ~always).all()
    # no token left out scores higher than one kept, and ties go to the lower position
    kept, out = np.nonzero(retained & ~always)[1], np.nonzero(~retained)[1]
    for i in out:
        assert all(scores[0, j] > scores[0, i] or (scores[0, j] == scores[0, i] and j < i) for j in kept)


def test_protected_regions_go_by_true_position() -> None:
    positions = np.array([0, 3, 4, 90, 99], dtype=np.int32)
    assert select.protected(positions, n_tokens=100, n_sink=4, n_recent=10).tolist() == [True, True, False, True, True]


def test_ballot_elects_what_most_heads_keep() -> None:
    ballot = select.Ballot(4)
    scores = np.array([[4, 3, 2, 1], [4, 1, 3, 2], [1, 2, 4, 3]], dtype=np.float32)
    ballot.add(select.top(scores, 2, np.zeros(scores.shape, dtype=np.bool_)), scores)
    elected = ballot.elect(2, np.zeros(4, dtype=np.bool_))
    assert elected.tolist() == [True, False, True, False]
    assert ballot.elect(2, np.array([False, False, False, True])).tolist() == [True, False, False, True]


def test_repair_votes_swap_where_more_heads_gain_than_lose() -> None:
    retained = np.array([True, True, False, False])
    votes = select.RepairVotes(retained, always=np.zeros(4, dtype=np.bool_))
    # token 2 is an orphan for 2 of 3 heads, token 3 for 1; token 0 is a donor for 2 of 3, token 1 for none
    best = np.array([[0.95, 0.1, 0.1, 0.1], [0.95, 0.1, 0.1, 0.99], [0.1, 0.1, 0.99, 0.99]], dtype=np.float32)
    votes.add(best, tau=0.9, admissible=np.ones(4, dtype=np.bool_))
    repaired, swaps, orphans, donors = votes.swap()
    assert (swaps, orphans, donors) == (1, 2, 1)
    assert repaired.tolist() == [False, True, True, False]


def test_repair_votes_leave_a_consistent_set_alone() -> None:
    retained = np.array([True, False])
    votes = select.RepairVotes(retained, always=np.zeros(2, dtype=np.bool_))
    votes.add(np.array([[0.1, 0.95]], dtype=np.float32), tau=0.9, admissible=np.ones(2, dtype=np.bool_))
    assert votes.swap()[0].tolist() == [True, False]
