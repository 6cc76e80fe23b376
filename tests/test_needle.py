"""The reason the repair exists: a number hidden in prose is still found after half the cache was evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import twinkv_edge as tk
from twinkv_edge.bench import needle
from twinkv_edge.tasks.needle import sample, sentences

SEEDS = range(10)


def test_samples_are_deterministic_and_hold_one_needle(licence_text: str) -> None:
    a, b, c = sample(licence_text, 1), sample(licence_text, 1), sample(licence_text, 2)
    assert a == b != c
    assert a.context.count(a.answer) == 1
    assert a.answer not in a.question
    assert len(a.answer) == 7
    at = sample(licence_text, 3, depth=0.0).context.index("One of the special magic numbers")
    assert at < 250
    assert len(sentences("One. Two; three: four!  Five")) == 5
    assert a.is_right(f" {a.answer}.")
    assert not a.is_right("1234567x")


def test_repairs_bring_needles_back(
    smollm2: str, licence_text: str, open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2)
    cfg = tk.Compression(ratio=0.5, tau=0.85)
    configs = {"full": cfg.with_(policy="none")}
    for policy in ("knorm", "streaming_llm"):
        for repair in ("none", "paper", "auto"):
            configs[f"{policy} {repair}"] = cfg.with_(policy=policy, repair=repair)
    got = needle.accuracy(needle.run(llm, [sample(licence_text, seed) for seed in SEEDS], configs))
    assert got["full"] >= 0.9
    for policy in ("knorm", "streaming_llm"):
        assert min(got[f"{policy} paper"], got[f"{policy} auto"]) >= got[f"{policy} none"] + 0.3, got


@pytest.mark.slow
def test_the_consistent_repair_does_too(
    smollm2: str, licence_text: str, open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2)
    cfg = tk.Compression(ratio=0.5, tau=0.80, policy="streaming_llm")
    configs = {"alone": cfg.with_(repair="none"), "repaired": cfg.with_(repair="consistent")}
    got = needle.accuracy(needle.run(llm, [sample(licence_text, seed) for seed in SEEDS], configs))
    assert got["repaired"] >= got["alone"] + 0.3, got
