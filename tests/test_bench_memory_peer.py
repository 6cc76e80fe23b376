"""KVPress in the memory benchmark: when it is taken, what is counted, and on a small model what it counts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from cli_common import Run, runner

import twinkv_edge as tk
from twinkv_edge.bench import memory, memory_peer
from twinkv_edge.errors import InputError


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_what_is_said_where_it_is_missing(run: Run, qwen3_tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)  # to import and find_spec, as if it were not there
    assert "kvpress" in memory_peer.missing()
    assert memory.peers(qwen3_tiny) == ([], None)
    assert memory.peers(qwen3_tiny, wanted=False) == ([], None)
    refused = run("bench", "memory", "--model", qwen3_tiny, "--peers")
    assert refused.code == 2
    assert "pip install 'twinkv-edge[peers]'" in refused.err.replace("\n", " ")


def test_which_models_it_is_taken_for(
    qwen3_tiny: str, tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_peer, "missing", list)
    chosen, why = memory.peers(qwen3_tiny, [0.25, 0.5])
    assert why is None
    assert [(c.kind, c.compression) for c in chosen] == [("kvpress", {"ratio": 0.25}), ("kvpress", {"ratio": 0.5})]
    assert all("0." in c.name and "bfloat16" in c.name for c in chosen)
    assert memory.peers(qwen3_tiny, wanted=False) == ([], None)
    none, why = memory.peers(tiny("tiny-gemma3"))
    assert none == []
    assert why is not None
    assert "gemma3" in why
    with pytest.raises(InputError, match="gemma3"):
        memory.peers(tiny("tiny-gemma3"), wanted=True)


def test_its_own_weights_and_layers_are_counted() -> None:
    life = [
        {"stage": stage, "tokens": 8, "cells": cells, "process": 1000, "cache": cache}
        for stage, cells, cache in [("created", 0, 0), ("prefill", 8, 8), ("prefill", 8, 12), ("evicted", 4, 8)]
    ]
    result = {"life": life, "peak_prefill": 1500, "peak_eviction": None, "allocated": 12, "prefill_s": 1.0}
    result |= {"evict_s": 0.1, "moved_s": None, "decode_ms": 1.0}
    row = memory._row(memory.Configuration("k", "kvpress", "bf16"), result, base=900, whole=99, scale=3)
    assert (row["created"], row["peak_prefill"], row["peak_eviction"]) == (100, 600, None)
    assert (row["cache_allocated"], row["cache_peak"], row["cache_evicted"], row["cells"]) == (12, 12, 8, 4)
    assert row["whole_evicted"] == 3 * 8
    assert row["whole_peak"] == 6 * 4 + 4  # of six layers five are evicted when the last is whole
    assert memory._steps(life, batches=6) == [1, 4, 7, 8]


def test_on_a_small_model(qwen3_tiny: str) -> None:
    pytest.importorskip("kvpress", reason="needs pip install 'twinkv-edge[peers]'")
    (chosen,), _ = memory.peers(qwen3_tiny, [0.5], wanted=True)
    job = {"kind": chosen.kind, "model": qwen3_tiny, "n_tokens": 300, "n_after": 64, "threads": 1}
    result = memory._child({**job, "compression": chosen.compression}, peer=True)
    row = memory._row(chosen, result, base=0, whole=0, scale=1)
    cell = sum(tk.models.facts(qwen3_tiny).bytes_per_token("bf16", "bf16"))
    assert row["cells"] == 150
    assert row["cache_evicted"] == 150 * cell
    assert row["cache_peak"] == row["cache_evicted"] + 150 * cell // 4  # the last of 4 layers, still whole
    assert row["cache_end"] == (150 + 64) * cell
    assert row["decode_ms"] > 0
    if "linux" in sys.platform:
        assert row["peak_prefill"] >= row["prefilled"] - memory.MIB
