"""Key spaces: RoPE undone exactly, and what does not change under any rotary schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkv_edge as tk
from twinkv_edge import key_space
from twinkv_edge.key_space import HALF_SPLIT, Rotation

Array = npt.NDArray[Any]
INTERLEAVED = 0
MODELS = ["tiny-llama", "tiny-llama3", "tiny-phi3", "tiny-qwen3", "tiny-mqa"]


def rotation(
    d: int, mode: int, base: float = 10000.0, factors: list[float] | None = None, n_dims: int | None = None
) -> Rotation:
    rope = {
        "n_dims": d if n_dims is None else n_dims,
        "mode": mode,
        "n_ctx_orig": 4096,
        "freq_base": base,
        "freq_scale": 1.0,
        "ext_factor": 0.0,
        "attn_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "freq_factors": factors or [],
    }
    return Rotation(rope, 0)


def rotated(rows: Array, angles: Array, mode: int) -> Array:
    """Rotates pair p of row [n, H, d] by angles[n, p]: by definition, in double precision."""
    n_dims = 2 * angles.shape[-1]
    pairs = np.arange(n_dims // 2)
    a, b = (pairs, pairs + n_dims // 2) if mode == HALF_SPLIT else (2 * pairs, 2 * pairs + 1)
    out = rows.astype(np.float64)
    cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x, y = out[..., a].copy(), out[..., b].copy()
    out[..., a], out[..., b] = x * cosines - y * sines, x * sines + y * cosines
    return out.astype(np.float32)


def clustered(n: int, n_heads: int, d: int, seed: int) -> Array:
    """Keys float32 [n, H, d], some of which are near duplicates of others."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(1, n // 4), n_heads, d))
    keys = centres[rng.integers(0, len(centres), n)] + 0.2 * rng.standard_normal((n, n_heads, d))
    return keys.astype(np.float32)


def counts(keys: Array, tau: float) -> Array:
    return tk.twin_counts(keys.transpose(1, 0, 2), tau, 4)


def threshold(keys: Array) -> float:
    """A similarity in the middle of the widest gap between pairs, so that rounding decides nothing."""
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    similar = np.sort(np.einsum("ihd,jhd->hij", unit, unit).ravel())
    similar = similar[(similar > 0.6) & (similar < 0.97)]
    gap = int(np.diff(similar).argmax())
    assert similar[gap + 1] - similar[gap] > 1e-5
    return float(similar[gap : gap + 2].mean())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    half=st.sampled_from([4, 8, 32]),
    rest=st.sampled_from([0, 8]),
    mode=st.sampled_from([INTERLEAVED, HALF_SPLIT]),
)
def test_pair_norms_do_not_see_a_rotary_schedule(seed: int, half: int, rest: int, mode: int) -> None:
    """Any angle for any position and pair: LongRoPE, a switch of schedules in mid-prompt, anything."""
    n, n_heads, d = 40, 2, 2 * half + rest
    keys = clustered(n, n_heads, d, seed)
    angles = np.random.default_rng(seed + 1).uniform(-np.pi, np.pi, (n, half))
    turned = rotated(keys, angles, mode)
    where = rotation(d, mode, n_dims=2 * half)
    plain = key_space.pair_norms(keys, where)
    assert plain.shape == (n, n_heads, half + rest)
    np.testing.assert_allclose(key_space.pair_norms(turned, where), plain, rtol=1e-5, atol=1e-6)
    tau = threshold(plain)
    np.testing.assert_array_equal(counts(key_space.pair_norms(turned, where), tau), counts(plain, tau))


@pytest.mark.parametrize("mode", [INTERLEAVED, HALF_SPLIT])
def test_the_cached_space_does_see_it(mode: int) -> None:
    keys = clustered(60, 2, 32, 0)
    angles = np.random.default_rng(1).uniform(-np.pi, np.pi, (60, 16))
    before, after = counts(keys, 0.8), counts(rotated(keys, angles, mode), 0.8)
    assert before.sum() > 100
    assert after.sum() < before.sum() / 4


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    mode=st.sampled_from([INTERLEAVED, HALF_SPLIT]),
    base=st.sampled_from([10000.0, 500000.0]),
    factors=st.one_of(st.none(), st.lists(st.floats(0.5, 64), min_size=16, max_size=16)),
    first=st.sampled_from([0, 5000]),
)
def test_rope_is_undone(seed: int, mode: int, base: float, factors: list[float] | None, first: int) -> None:
    n, n_heads, d = 24, 2, 36  # the last 4 dimensions are not rotated
    keys = clustered(n, n_heads, d, seed)
    positions = first + np.arange(n) * 3
    divisors = np.ones(16) if factors is None else np.array(factors, np.float32)
    angles = positions[:, None] * base ** (-np.arange(16) / 16) / divisors
    cached = rotated(keys, angles, mode)
    each = np.broadcast_to(positions[:, None], (n, n_heads)).astype(np.int32)
    back = key_space.unrotated(cached, each, rotation(d, mode, base, factors, n_dims=32))
    # angles are single precision in ggml: at position 5000 an angle is off by up to 5000 / 2^23
    np.testing.assert_allclose(back, keys, atol=2e-5 if first == 0 else 5e-3)
    for axes in ((1, 0, 2), (2, 1, 0)):  # heads first in memory, dimensions first
        laid_out = np.ascontiguousarray(cached.transpose(axes)).transpose(axes)
        other = key_space.unrotated(laid_out, each, rotation(d, mode, base, factors, n_dims=32))
        np.testing.assert_array_equal(other, back)


@pytest.mark.parametrize("cache_type", [llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_Q8_0])
@pytest.mark.parametrize("like", MODELS)
def test_a_token_has_one_key_wherever_it_stands(
    like: str, cache_type: int, tiny: Callable[[str], str], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """Keys of the first layer depend on the token alone before RoPE: llama.cpp's own rotation, of every kind that
    these models have, is taken back by what the tap read from the graph. Quantized caches are Hadamard-rotated."""
    llm = open_llm(tiny(like), type_k=cache_type, type_v=cache_type)
    words = [7, 11, 100]
    tokens = [words[i % 3] for i in range(600)]
    llm.eval(tokens)
    layer = llm.kv.layers[0]
    positions = llm.kv.positions(0)
    rope = layer.rotation.rope
    assert bool(rope["freq_factors"]) == (like in ("tiny-llama3", "tiny-phi3"))
    assert rope["mode"] == (INTERLEAVED if like in ("tiny-llama", "tiny-llama3", "tiny-mqa") else HALF_SPLIT)
    cached = llm.kv.keys(0)
    plain = key_space.unrotated(cached, positions, layer.rotation)
    norms = key_space.pair_norms(cached, layer.rotation)
    rounding = 0.002 if cache_type == llama_cpp.GGML_TYPE_F16 else 0.02
    for word in range(3):
        for space in (plain, norms):
            same = space[word::3]
            size = np.abs(same).max()
            assert np.abs(same - same[:1]).max() < rounding * size
        assert np.abs(cached[word::3] - cached[word : word + 1]).max() > 0.2 * np.abs(cached).max()
    n = len(tokens)
    expected = np.array([n // 3 - 1 - sum(0 < abs(i - j) <= 32 for j in range(i % 3, n, 3)) for i in range(n)])
    for head in range(llm.kv.n_head_kv):
        found = tk.twin_counts(plain[:, head], 0.99, 32)
        np.testing.assert_array_equal(found, expected)
        assert (tk.twin_counts(cached[:, head], 0.99, 32) != expected).any()


@pytest.mark.parametrize("space", ["unrotated", "pair_norm"])
def test_compress_compares_in_the_space(space: str, evaluated: tk.CompressedLlama) -> None:
    """The settings reach the repair: other twins, other swaps than in the space of the cache, the same budget."""
    from twinkv_edge import pipeline

    plans = [
        pipeline.make_plan(
            evaluated.kv, tk.Compression(policy="knorm", ratio=0.5, key_space=name, repair="paper", tau=0.9), 0.9
        )
        for name in ("rope", space)
    ]
    assert plans[0].retained.sum() == plans[1].retained.sum()
    assert plans[0].swaps != plans[1].swaps
    index = 12
    keys, positions = evaluated.kv.keys(index), evaluated.kv.positions(index)
    where = evaluated.kv.layers[index].rotation
    made = key_space.unrotated(keys, positions, where) if space == "unrotated" else key_space.pair_norms(keys, where)
    policy = tk.Compression(policy="knorm", ratio=0.5, repair="none")
    alone = pipeline.make_plan(evaluated.kv, policy, 0.9).retained[index]
    expected = tk.repair(made.transpose(1, 0, 2), alone, tau=0.9).retained
    np.testing.assert_array_equal(plans[1].retained[index], expected)
