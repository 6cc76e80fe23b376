"""The memory benchmark on a small model: what it prints holds together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def test_a_configuration_that_fails_does_not_cost_the_others(qwen3_tiny: str) -> None:
    which = [
        memory.Configuration("oracle", "twinkv_edge", "f16", {"policy": "oracle"}),
        memory.Configuration("as it is", "llama.cpp", "f16"),
    ]
    result = memory.run(qwen3_tiny, n_ctx=512, n_tokens=100, n_after=8, threads=1, which=which)
    assert [r["name"] for r in result["rows"]] == ["as it is"]
    assert list(result["left_out"]) == ["oracle"]
    assert "Without oracle: " in memory.markdown(result)


@pytest.mark.parametrize("measured", [0, 1])
def test_ctrl_c_shows_what_was_measured(measured: int, qwen3_tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = memory._child, []

    def child(job: dict[str, Any], peer: bool = False) -> dict[str, Any]:
        if job["kind"] != "weights" and len(seen) == measured:
            raise KeyboardInterrupt
        seen.extend([job["name"]] if "name" in job else [])
        return real(job, peer)

    monkeypatch.setattr(memory, "_child", child)
    which = [memory.Configuration(name, "llama.cpp", "f16") for name in ("first", "second", "third")]
    arguments: dict[str, Any] = {"n_ctx": 512, "n_tokens": 100, "n_after": 8, "threads": 1, "which": which}
    if not measured:
        with pytest.raises(KeyboardInterrupt):
            memory.run(qwen3_tiny, **arguments)
        return
    result = memory.run(qwen3_tiny, **arguments)
    assert [r["name"] for r in result["rows"]] == ["first"]
    assert result["left_out"] == {"second": "interrupted", "third": "interrupted"}
