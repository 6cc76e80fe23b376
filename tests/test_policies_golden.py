"""Policies against the scores of KVPress on the same weights and tokens (see tests/data/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import cache_scores

import twinkv_edge as tk

POLICIES = ["observed_attention", "snapkv", "expected_attention", "tova", "keydiff", "knorm"]


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of the top-50 % sets, per layer and head: [L, H]."""
    half = a.shape[-1] // 2
    top_a, top_b = (np.argsort(-x, axis=-1, kind="stable")[..., :half] for x in (a, b))
    sets = np.zeros((2, *a.shape), dtype=bool)
    np.put_along_axis(sets[0], top_a, True, axis=-1)
    np.put_along_axis(sets[1], top_b, True, axis=-1)
    return (sets[0] & sets[1]).sum(-1) / (sets[0] | sets[1]).sum(-1)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's, per layer and head: [L, H]."""
    ranks = [np.argsort(np.argsort(x, axis=-1, kind="stable"), axis=-1).astype(float) for x in (a, b)]
    ranks = [r - r.mean(axis=-1, keepdims=True) for r in ranks]
    return (ranks[0] * ranks[1]).sum(-1) / np.sqrt((ranks[0] ** 2).sum(-1) * (ranks[1] ** 2).sum(-1))


@pytest.mark.parametrize("policy", POLICIES)
def test_agreement_on_smollm2(policy: str, evaluated: tk.CompressedLlama, golden: Any) -> None:
    iou = overlap(cache_scores(evaluated, policy), golden[policy])
    assert iou.mean() >= 0.97
    assert iou.min() >= 0.93


@pytest.mark.parametrize("policy", POLICIES[1:])  # observed attention is in the other file only
def test_agreement_on_qwen3(policy: str, evaluated_qwen3: tk.CompressedLlama, golden_qwen3: Any) -> None:
    scores = cache_scores(evaluated_qwen3, policy)
    assert overlap(scores, golden_qwen3[policy]).mean() >= 0.995
    assert rank_correlation(scores, golden_qwen3[policy]).min() >= 0.999


@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_attention_itself_agrees_on_qwen3(policy: str, evaluated_qwen3: tk.CompressedLlama, golden_qwen3: Any) -> None:
    np.testing.assert_allclose(cache_scores(evaluated_qwen3, policy), golden_qwen3[policy], rtol=0.01, atol=1e-6)


def test_tk_score_is_the_same(
    qwen3_tiny: str, evaluated_qwen3: tk.CompressedLlama, golden_qwen3: Any, open_llm: Callable[..., Any]
) -> None:
    scores = tk.score(open_llm(qwen3_tiny), golden_qwen3["tokens"].tolist(), policy="snapkv")
    np.testing.assert_array_equal(scores, cache_scores(evaluated_qwen3, "snapkv"))
