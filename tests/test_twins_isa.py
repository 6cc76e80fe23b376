"""Every instruction set the kernels are built for, forced, against the reference: tile borders, odd memory.

And keys on which a low-precision filter without a right bound goes wrong.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from twins_common import clustered, comparable, sim_matrix

from twinkv_edge import twins
from twinkv_edge.errors import InputError
from twinkv_edge.repair import repair
from twinkv_edge.twins import best_twin, twin_counts


def _params() -> list:
    if twins.unavailable("native") is not None:
        return []
    return [
        pytest.param(name, marks=[] if here else [pytest.mark.skip(reason=f"this processor does not have {name}")])
        for name, here in twins.isas().items()
    ]


@pytest.fixture(params=_params())
def isa(request):
    twins.set_isa(request.param)
    yield request.param
    twins.set_isa(None)


def check(keys, tau=0.85, window=32, seed=0, position=None, n_threads=2):
    """Counts and best twins of native kernels, exactly those of the formulas."""
    position = np.arange(len(keys)) if position is None else position
    sim, far = sim_matrix(keys), comparable(position, window)
    counts = twin_counts(keys, tau, window, positions=position, backend="native", n_threads=n_threads)
    np.testing.assert_array_equal(counts, np.sum((sim > np.float32(tau)) & far, axis=1))
    retained = np.random.default_rng(seed).random(len(keys)) < 0.5
    best = best_twin(keys, retained, window, positions=position, backend="native", n_threads=n_threads)
    masked = np.where(far & retained & ~np.isnan(sim), sim, np.float32(-1))
    np.testing.assert_array_equal(best, np.maximum(masked.max(axis=1, initial=-1), np.float32(-1)))


def test_forced(isa):
    assert twins.isa() == isa


@pytest.mark.parametrize("d", [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 127, 128, 129, 256, 576])
def test_any_dimension(isa, d):
    rng = np.random.default_rng(d)
    check(clustered(rng, 70, d, noise=0.6), 0.7, 3)


@pytest.mark.parametrize("n", [1, 2, 15, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 129, 191, 257, 511, 700])
def test_any_length(isa, n):
    check(clustered(np.random.default_rng(n), n, 24), 0.8, 5)


@pytest.mark.parametrize("window", [0, 1, 30, 31, 32, 33, 63, 64, 65, 100, 199, 200, 201, 10**6])
def test_any_window(isa, window):
    check(clustered(np.random.default_rng(window), 201, 16), 0.8, window)


def test_positions_with_gaps(isa):
    rng = np.random.default_rng(11)
    position = np.sort(rng.choice(2000, 333, replace=False)).astype(np.int32)
    check(clustered(rng, 333, 40), 0.8, 32, position=position)
    check(clustered(rng, 333, 40), 0.8, 32, position=position.astype(np.int64) - 2**31)


def hard_keys(name: str) -> np.ndarray:
    """float32 [200, 64]"""
    rng = np.random.default_rng(len(name))
    keys = rng.standard_normal((200, 64)).astype(np.float32)
    if name == "common mean":
        keys += 20
    elif name == "one channel":
        keys[:, 7] *= 300
    elif name == "nearly equal":
        keys = keys[:1] + np.float32(1e-3) * keys
    elif name == "heavy tails":
        keys = np.sign(keys) * np.abs(keys) ** 7
    elif name == "sparse":
        keys *= rng.random((200, 64)) < 0.05
    elif name == "opposite":
        keys = keys[:1] * np.where(np.arange(200) % 2, 1, -1)[:, None] + np.float32(0.05) * keys
    elif name == "huge":
        keys *= np.float32(1e37)
    elif name == "denormal":
        keys *= np.float32(1e-41)
    elif name == "one huge, rest denormal":
        keys *= np.float32(1e-41)
        keys[:, 3] = 1e30
    return keys.astype(np.float32)


HARD = [
    "plain",
    "common mean",
    "one channel",
    "nearly equal",
    "heavy tails",
    "sparse",
    "opposite",
    "huge",
    "denormal",
    "one huge, rest denormal",
]


@pytest.mark.parametrize("name", HARD)
def test_hard_keys(isa, name):
    keys = hard_keys(name)
    sim = sim_matrix(keys)
    finite = np.sort(sim[np.isfinite(sim) & (sim > -0.99)])
    for quantile in (0.02, 0.5, 0.98):
        tau = float(min(finite[int(quantile * (len(finite) - 1))], 1.0))  # a similarity that occurs: a tie
        check(keys, tau, 4)


def test_keys_without_direction(isa):
    keys = clustered(np.random.default_rng(1), 150, 20, clusters=2)
    keys[[0, 33, 64, 149]] = 0
    keys[[5, 32]] = np.nan
    keys[63, 3] = np.inf
    keys[96, 0] = -np.inf
    check(keys, 0.5, 0)
    check(keys, -0.5, 0)
    check(np.zeros((70, 8), np.float32), 0.5, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_misaligned_keys(isa, dtype):
    rng = np.random.default_rng(4)
    keys = clustered(rng, 90, 37).astype(dtype)
    raw = np.zeros(keys.nbytes + 64, np.uint8)
    for offset in (dtype().itemsize, 1):
        odd = np.frombuffer(raw.data, dtype, keys.size, offset).reshape(keys.shape)
        odd[...] = keys
        check(odd, 0.8, 8)


@pytest.mark.parametrize("copies", [2, 40, 300])
def test_copies_of_one_key(isa, copies):
    """Ties everywhere: more equally good pairs than are remembered at once."""
    rng = np.random.default_rng(copies)
    keys = clustered(rng, 600 // copies + 1, 30)[rng.integers(600 // copies + 1, size=600)]
    check(keys, 0.9999, 2)
    check(keys, 1.0, 2)


@functools.cache
def _long() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """20,000 keys, their counts and best twins, summed by BLAS in double (off by 1e-15)."""
    rng = np.random.default_rng(20)
    keys = clustered(rng, 20_000, 8, clusters=300, noise=0.35)
    unit = keys / np.sqrt((keys.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    unit = unit.astype(np.float32).astype(np.float64)
    retained = rng.random(20_000) < 0.3
    counts, best = np.zeros(20_000, np.int32), np.zeros(20_000, np.float32)
    for start in range(0, 20_000, 1000):
        sim = (unit[start : start + 1000] @ unit.T).astype(np.float32)
        for row in range(1000):
            sim[row, max(0, start + row - 32) : start + row + 33] = -1
        counts[start : start + 1000] = np.sum(sim > np.float32(0.95), axis=1)
        best[start : start + 1000] = sim[:, retained].max(axis=1)
    return keys, retained, counts, best


def test_twenty_thousand_tokens(isa):
    keys, retained, counts, best = _long()
    np.testing.assert_array_equal(twin_counts(keys, 0.95, backend="native"), counts)
    np.testing.assert_array_equal(best_twin(keys, retained, backend="native"), best)
    assert counts.max() > 10


def test_threads_do_not_change_results(isa):
    rng = np.random.default_rng(5)
    keys = clustered(rng, 1500, 64, clusters=60)
    retained = rng.random(1500) < 0.5
    options = {"backend": "native"}
    first = None
    for n_threads in range(1, 9):
        got = (
            twin_counts(keys, 0.8, n_threads=n_threads, **options),
            best_twin(keys, retained, n_threads=n_threads, **options),
            repair(keys, retained, tau=0.8, n_threads=n_threads, **options).retained,
            repair(keys, retained, tau=0.8, n_threads=n_threads, mode="consistent", **options).retained,
        )
        first = first or got
        for a, b in zip(first, got, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", ["paper", "consistent"])
def test_repair_is_that_of_the_reference(isa, mode):
    rng = np.random.default_rng(6)
    keys = np.stack([clustered(rng, 400, 48, clusters=30, noise=0.4 + 0.1 * h) for h in range(5)])
    retained = rng.random((5, 400)) < 0.4
    got = repair(keys, retained, tau=0.8, mode=mode, backend="native")
    expected = repair(keys, retained, tau=0.8, mode=mode, backend="numpy")
    np.testing.assert_array_equal(got.retained, expected.retained)
    np.testing.assert_array_equal(got.n_swaps, expected.n_swaps)
    assert (got.n_swaps > 0).all()


def test_isa_that_is_not_there():
    with pytest.raises(InputError, match="abacus"):
        twins.set_isa("abacus")
