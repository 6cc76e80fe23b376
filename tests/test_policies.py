"""Finding policies by name, and those that need nothing but the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import cache_scores

import twinkv_edge as tk
from twinkv_edge import policies
from twinkv_edge.errors import InputError


# llama.cpp rounds activations to 8 bits, and its kernels for AVX-512 and for AVX2 do so differently: on the one 99.1 %
# of the counts agree at tau 0.90, on the other 98.996 %. The F32 model below has no such rounding.
@pytest.mark.parametrize(("tau", "share"), [(0.90, 0.985), (0.85, 0.92)])
def test_twin_counts_of_the_cache_agree_with_the_peer(
    tau: float, share: float, evaluated: tk.CompressedLlama, golden: Any
) -> None:
    expected = golden[f"twin_counts_t{round(100 * tau)}_w32"]
    counts = np.stack([tk.twin_counts(evaluated.kv.keys(i).transpose(1, 0, 2), tau) for i in range(30)])
    assert (counts == expected).mean() >= share


def test_twinkv_is_the_negative_normalized_count(evaluated_qwen3: tk.CompressedLlama) -> None:
    keys = evaluated_qwen3.kv.keys(1).transpose(1, 0, 2)
    scores = cache_scores(evaluated_qwen3, "twinkv", tau=0.85)[1]
    np.testing.assert_allclose(scores, -tk.twin_counts(keys, 0.85) / keys.shape[1], rtol=1e-6)


def test_streaming_llm_keeps_sinks_and_the_newest(evaluated_qwen3: tk.CompressedLlama) -> None:
    order = np.argsort(-cache_scores(evaluated_qwen3, "streaming_llm")[0, 0], kind="stable")
    assert sorted(order[:14].tolist()) == [0, 1, 2, 3, *range(890, 900)]


def test_random_is_seeded(evaluated_qwen3: tk.CompressedLlama) -> None:
    a, b, c = (cache_scores(evaluated_qwen3, "random", seed=s) for s in (1, 1, 2))
    assert (a == b).all()
    assert (a != c).any()
    assert (a[0] != a[1]).any()


def test_score_evaluates_the_prompt(qwen3_tiny: str, golden_qwen3: Any, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    scores = tk.score(llm, golden_qwen3["tokens"].tolist(), policy="knorm")
    assert scores.shape == golden_qwen3["knorm"].shape
    np.testing.assert_allclose(scores, golden_qwen3["knorm"], rtol=2e-3)
    with pytest.raises(InputError):
        tk.score(llm, [], policy="knorm")


def test_unknown_names_and_options() -> None:
    with pytest.raises(InputError, match="streaming_llm"):
        policies.create("oracle")
    with pytest.raises(InputError, match="no option temperature"):
        policies.create("knorm", {"temperature": 1})


def test_settings_reach_the_policy_unless_it_is_told_otherwise() -> None:
    assert policies.create("twinkv", {}, {"tau": 0.8, "local_window": 5}).tau == 0.8  # type: ignore[attr-defined]
    assert policies.create("twinkv", {"tau": 0.7}, {"tau": 0.8}).tau == 0.7  # type: ignore[attr-defined]


def test_a_policy_can_be_registered() -> None:
    class Last(policies.Policy):
        name = "test_last"
        summary = "the last tokens"

        def score(self, layer: policies.LayerView) -> np.ndarray:
            return layer.positions.astype(np.float32)

    assert policies.register(Last) is Last
    assert isinstance(policies.create("test_last"), Last)
    with pytest.raises(InputError, match="registered already"):
        policies.register(type("Other", (Last,), {}))
    with pytest.raises(InputError, match="no policy"):
        policies.register(int)  # type: ignore[arg-type]
