"""What is captured while a prompt is evaluated: the same however it is cut into batches, and never silently missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import CAPTURED, cache_scores, layer_view, logits, prompt

import twinkv_edge as tk
from twinkv_edge import policies

Q8_0 = llama_cpp.GGML_TYPE_Q8_0


@pytest.mark.parametrize("like", ["tiny-qwen3", "tiny-mqa", "tiny-mha", "tiny-llama3", "tiny-phi3"])
def test_batches_do_not_matter(like: str, tiny: Callable[[str], str], open_llm: Callable[..., Any]) -> None:
    """300 tokens in micro-batches of 32, of 128, of 7, in one batch, in two calls, and without flash attention."""
    tokens = prompt(300)
    found: dict[str, list[np.ndarray]] = {policy: [] for policy in CAPTURED}
    settings = ({"n_ubatch": 32}, {"n_ubatch": 128, "n_batch": 128}, {}, {"flash_attn": False}, {"n_ubatch": 7})
    for setting in settings:
        llm = open_llm(tiny(like), n_ctx=512, **setting)
        llm.capture_for(*CAPTURED)
        llm.eval(tokens)
        for policy in CAPTURED:
            found[policy].append(cache_scores(llm, policy))
    llm.reset()
    llm.eval(tokens[:77])
    llm.eval(tokens[77:])
    for policy in CAPTURED:
        found[policy].append(cache_scores(llm, policy))
        for other in found[policy][1:]:
            np.testing.assert_allclose(other, found[policy][0], rtol=5e-3, atol=1e-5)


def test_quantized_caches_score_alike(smollm2: str, licence_tokens: list[int], open_llm: Callable[..., Any]) -> None:
    """Queries and keys of a quantized cache carry a Hadamard product; the scores must not see it."""
    plain, quantized = open_llm(smollm2), open_llm(smollm2, type_k=Q8_0, type_v=Q8_0)
    assert (plain.kv.layers[0].rotation.hadamard, quantized.kv.layers[0].rotation.hadamard) == (0, 64)
    for llm in (plain, quantized):
        llm.capture_for(*CAPTURED)
        llm.eval(licence_tokens[:256])
    for policy in CAPTURED:
        a, b = (cache_scores(llm, policy).reshape(90, -1) for llm in (plain, quantized))
        assert min(np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)) > 0.98


def test_statistics_are_mean_and_covariance(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """Against the window of all queries, rotated back in Python."""
    llm = open_llm(qwen3_tiny)
    llm.capture_for(policies.SnapKV(window=300), "expected_attention")
    llm.eval(prompt(200))
    layer = layer_view(llm, 2)
    queries, positions = layer.last_queries(300)
    assert positions.tolist() == list(range(200))
    each = np.repeat(positions[:, None], queries.shape[1], axis=1)
    plain = tk.key_space.unrotated(queries, each, layer.rotation)[4:].astype(np.float64)
    centred = plain - plain.mean(axis=0)
    mean, covariance = layer.query_statistics
    np.testing.assert_allclose(mean, plain.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(covariance, np.einsum("nha,nhb->hab", centred, centred) / 196, atol=1e-5)


# -- taking tokens back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CAPTURED)
def test_taking_a_few_tokens_back(policy: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """A prompt whose end is evaluated anew, as generate() does with live or stale logits."""
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy=policy))
    tokens = prompt(200)
    llm.eval(tokens)
    expected = cache_scores(llm, policy)
    llm.eval(prompt(40, seed=1))
    llm.n_tokens = 180
    llm.eval(tokens[180:])
    if policy == "snapkv":  # 60 queries were taken back; 4 of those before are left
        with pytest.warns(UserWarning, match="last 24 queries were captured of a window of 64"):
            cache_scores(llm, policy)
    else:
        np.testing.assert_allclose(cache_scores(llm, policy), expected, rtol=5e-3, atol=1e-5)


def test_taking_more_back_than_is_held_drops_the_statistics(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy="expected_attention"))
    tokens = prompt(300)
    llm.eval(tokens)
    llm.n_tokens = 100
    llm.eval(tokens[100:])
    with pytest.raises(tk.CacheStateError, match="296 tokens from the fifth on, and 200 were captured"):
        cache_scores(llm, "expected_attention")
    llm.reset()
    llm.eval(tokens)
    assert cache_scores(llm, "expected_attention").shape == (4, 2, 300)


# -- queries that were not seen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CAPTURED)
def test_a_policy_chosen_after_the_prompt(policy: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy="knorm"))
    llm.eval(prompt(300))
    before = llm.kv.keys(1)
    with pytest.raises(tk.CacheStateError, match="evaluate the prompt again"):
        llm.compress(policy=policy)
    np.testing.assert_array_equal(llm.kv.keys(1), before)
    llm.compression = tk.Compression(policy=policy)
    with pytest.raises(tk.CacheStateError, match="evaluate the prompt again"):
        llm.compress()
    llm.reset()
    llm.eval(prompt(300))
    assert llm.compress().n_after == 150


@pytest.mark.parametrize("policy", CAPTURED)
def test_a_restored_state(policy: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy=policy))
    llm.eval(prompt(300))
    llm.load_state(llm.save_state())
    with pytest.raises(tk.CacheStateError, match="evaluate the prompt again"):
        llm.compress()


def test_a_reused_prefix_that_was_not_seen(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(300))
    llm.compression = tk.Compression(policy="expected_attention")
    llm.eval(prompt(20))
    with pytest.raises(tk.CacheStateError, match="316 tokens from the fifth on, and 20 were captured"):
        llm.compress()
    llm.compression = tk.Compression(policy="snapkv")
    llm.eval(prompt(20))
    with pytest.warns(UserWarning, match="last 20 queries"):
        report = llm.compress()
    assert "last 20 queries" in report.notes[0]


# -- short prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_shorter_than_the_window(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy="snapkv", n_recent=8))
    llm.eval(prompt(50))
    with pytest.warns(UserWarning, match="shrunk to 25"):
        report = llm.compress(repair="none", ratio=0.4)
    assert "shrunk to 25" in report.notes[0]
    assert report.n_after == 30
    assert all((llm.kv.positions(layer)[-25:, 0] == np.arange(25, 50)).all() for layer in range(4))
    longer = open_llm(qwen3_tiny, compression=tk.Compression(policy="snapkv"))
    longer.eval(prompt(65))
    assert longer.compress(n_recent=8).notes == ()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_the_shortest_prompts(n: int, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    with pytest.warns(UserWarning, match="shrunk"):
        assert np.isfinite(tk.score(llm, prompt(n), policy="snapkv")).all()
    assert np.isfinite(tk.score(llm, prompt(n), policy="tova")).all()
    if n <= 4:
        with pytest.raises(tk.InputError, match="more than 4 tokens"):
            tk.score(llm, prompt(n), policy="expected_attention")
    else:
        assert np.isfinite(tk.score(llm, prompt(n), policy="expected_attention")).all()


# -- after an eviction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CAPTURED)
def test_a_cache_compressed_before(policy: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """Heads hold different tokens. The scores of those that are left are as finite and as ranked as ever, and the
    newest tokens come out on top of SnapKV's and TOVA's."""
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy=policy))
    llm.eval(prompt(300))
    llm.compress(ratio=0.5)
    llm.eval(prompt(100, seed=1))
    again = cache_scores(llm, policy)
    assert again.shape == (4, 2, 250)
    assert np.isfinite(again).all()
    if policy in ("snapkv", "tova"):
        assert (again.argmax(axis=-1) >= (250 - 64)).all()
    report = llm.compress(target_tokens=120)
    assert (report.n_before, report.n_after, report.n_tokens) == (250, 120, 400)


def test_sliding_window_layers_are_not_captured(tiny: Callable[[str], str], open_llm: Callable[..., Any]) -> None:
    llm = open_llm(tiny("tiny-gemma3"), compression=tk.Compression(policy="snapkv"))
    llm.eval(prompt(100))
    evictable = {layer.tap_index for layer in llm.kv.layers}
    held = [llm._tap.window_size(i) for i in range(llm._tap.n_layers)]
    assert 0 < len(evictable) < len(held)
    assert held == [64 if i in evictable else 0 for i in range(len(held))]


def test_capture_does_not_change_the_logits(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    plain, watched = open_llm(qwen3_tiny), open_llm(qwen3_tiny)
    watched.capture_for(*CAPTURED)
    for llm in (plain, watched):
        llm.eval(prompt(300))
    np.testing.assert_array_equal(logits(watched), logits(plain))
