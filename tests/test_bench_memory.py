"""The memory benchmark on a small model: what it prints holds together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twinkv_edge.bench import memory
from twinkv_edge.errors import InputError, TwinKVError


def test_table_and_plot(qwen3_tiny: str, tmp_path: Path) -> None:
    which = [
        memory.Configuration("as it is", "llama.cpp", "f16"),
        memory.Configuration("evicted", "twinkv_edge", "q8_0", {"policy": "knorm", "ratio": 0.5}),
        memory.Configuration(
            "bounded", "twinkv_edge", "f16", {"policy": "knorm", "target_tokens": 256, "prefill": "bounded"}
        ),
    ]
    result = memory.run(qwen3_tiny, n_ctx=1024, n_tokens=800, n_batch=128, n_after=16, threads=2, which=which)
    plain, evicted, bounded = result["rows"]
    assert plain["cells"] == 800
    assert evicted["cells"] == 400
    assert bounded["cells"] <= 256 + 128
    assert bounded["cache_peak"] < bounded["cache_allocated"] / 2
    assert evicted["evict_s"] > 0
    assert all(r["decode_ms"] > 0 for r in result["rows"])
    assert plain["cache_evicted"] == plain["cache_allocated"] == 2 * evicted["cache_allocated"] * 16 // 17
    table = memory.markdown(result).splitlines()[2:]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    if "linux" in sys.platform:
        assert plain["life"][0]["process"] is not None


def test_fewer_layers_are_scaled_and_labelled(qwen3_tiny: str) -> None:
    which = [memory.Configuration(kind, kind, "f16", {"policy": "none"}) for kind in ("llama.cpp", "twinkv_edge")]
    result = memory.run(qwen3_tiny, n_ctx=256, n_tokens=200, n_after=8, threads=1, which=which, of_layers=36)
    plain, ours = result["rows"]
    assert plain["whole_evicted"] == 9 * plain["cache_allocated"]  # the model has 4
    assert ours["whole_peak"] == 9 * ours["cache_peak"]
    table = memory.markdown(result)
    assert "4 of the model's 36 layers" in table
    assert "at most, 36 layers" in table


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    life = [{"stage": "prefill", "tokens": i, "cells": i, "process": i * memory.MIB, "cache": None} for i in range(4)]
    row = {"name": "x", "kind": "llama.cpp", "life": life}
    memory.plot(
        {"rows": [row], "n_batch": 1, "model": "m", "n_tokens": 4, "n_ctx": 8, "n_layer": 1, "of_layers": None},
        tmp_path / "memory.png",
    )
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_refuses(qwen3_tiny: str) -> None:
    with pytest.raises(InputError, match="do not fit"):
        memory.run(qwen3_tiny, n_ctx=512, n_tokens=500)
    broken = [memory.Configuration("oracle", "twinkv_edge", "f16", {"policy": "oracle"})]
    with pytest.raises(TwinKVError, match="oracle"):
        memory.run(qwen3_tiny, n_ctx=512, n_tokens=100, n_after=8, which=broken)
