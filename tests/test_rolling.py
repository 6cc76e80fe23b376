"""Bounded prefill, and eviction that happens by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import decode, logits

import twinkv_edge as tk

Open = Callable[..., tk.CompressedLlama]
Q8_0 = llama_cpp.GGML_TYPE_Q8_0


def bounded(target: int, **settings: Any) -> tk.Compression:
    return tk.Compression(policy="knorm", target_tokens=target, prefill="bounded", n_recent=32, **settings)


@pytest.mark.parametrize("repair", ["none", "paper", "consistent", "coverage"])
def test_bounded_prefill_holds_the_bound(repair: str, qwen3_tiny: str, golden_qwen3: Any, open_llm: Open) -> None:
    tokens = (golden_qwen3["tokens"].tolist() * 3)[:2000]
    llm = open_llm(qwen3_tiny, n_ctx=512, n_batch=64, compression=bounded(200, repair=repair))
    cells: list[int] = []
    llm.eval(tokens, progress=lambda done, total, used: cells.append(used))
    assert max(cells) <= 200 + 64
    assert llm.n_tokens == 2000
    assert llm.kv.n_cells <= 264
    assert len(llm.compressions) == 28  # 32 batches, the first 4 fit
    positions = llm.kv.positions(0)
    assert (np.diff(positions, axis=0) > 0).all()  # true positions, ascending per head
    assert positions[:4].tolist() == [[i, i] for i in range(4)]  # sinks
    assert positions[-1].tolist() == [1999, 1999]
    used, resident = llm.footprint().bytes_used, llm.footprint().bytes_resident
    assert resident <= used * (264 / llm.kv.n_cells) * 1.3 + 8 * 4096


def test_bounded_prefill_that_never_evicts_changes_nothing(
    smollm2: str, licence_tokens: list[int], open_llm: Open
) -> None:
    types = {"type_k": Q8_0, "type_v": Q8_0, "n_batch": 128}
    plain = open_llm(smollm2, **types)
    plain.eval(licence_tokens[:400])
    llm = open_llm(smollm2, compression=bounded(600), **types)
    llm.eval(licence_tokens[:400])
    assert llm.compressions == []
    np.testing.assert_array_equal(logits(llm), logits(plain))


def test_a_document_longer_than_the_context_is_answered(
    smollm2: str, licence_tokens: list[int], open_llm: Open
) -> None:
    llm = open_llm(smollm2, n_ctx=512, n_batch=128, compression=bounded(320))
    done = llm.create_completion(licence_tokens, max_tokens=8, temperature=0)
    assert done["usage"]["prompt_tokens"] == len(licence_tokens) == 1200
    assert done["usage"]["completion_tokens"] == 8
    assert llm.kv.n_cells <= 448


def test_what_bounded_prefill_refuses(qwen3_tiny: str, golden_qwen3: Any, open_llm: Open) -> None:
    tokens = golden_qwen3["tokens"].tolist()
    llm = open_llm(qwen3_tiny, n_ctx=512, n_batch=64, compression=bounded(80))
    with pytest.raises(tk.InputError, match="below sinks"):
        llm.eval(tokens)
    llm.compression = bounded(500)
    with pytest.raises(tk.InputError, match="do not fit"):
        llm.eval(tokens)
    llm.compression = bounded(200)
    with pytest.raises(tk.InputError, match="trained for"):
        llm.eval([1] * (llm.n_ctx_train + 1))
    assert llm.n_tokens == 0
    for settings in ({"prefill": "bounded"}, {"trigger_tokens": 100, "target_tokens": 100}):
        with pytest.raises(tk.InputError):
            tk.Compression(**settings)  # type: ignore[arg-type]
    with pytest.raises(tk.InputError, match="none"):
        tk.Compression(policy="none", trigger_tokens=100)


def test_a_long_answer_rolls_on(qwen3_tiny: str, golden_qwen3: Any, open_llm: Open) -> None:
    cfg = tk.Compression(policy="keydiff", target_tokens=150, trigger_tokens=200, n_recent=32)
    llm = open_llm(qwen3_tiny, n_ctx=256, compression=cfg)
    llm.eval(golden_qwen3["tokens"].tolist()[:100])
    cells = []
    for token in (golden_qwen3["tokens"].tolist() * 2)[100:900]:
        llm.eval([token])
        cells.append(llm.kv.n_cells)
    assert max(cells) <= 200
    assert llm.n_tokens == 900
    assert len(llm.compressions) >= 10
    assert all(r.n_after == 150 for r in llm.compressions)


def test_the_newest_turn_and_protected_tokens_stay(qwen3_tiny: str, golden_qwen3: Any, open_llm: Open) -> None:
    tokens = golden_qwen3["tokens"].tolist()
    cfg = tk.Compression(policy="random", target_tokens=150, trigger_tokens=200, n_recent=8)
    llm = open_llm(qwen3_tiny, n_ctx=512, compression=cfg)
    llm.eval(tokens[:120])
    llm.protect(30)
    llm.eval(tokens[120:180])  # the newest turn: 60 tokens
    for token in tokens[180:205]:
        llm.eval([token])
    assert len(llm.compressions) == 1
    kept = llm.kv.positions(1)
    for head in range(2):
        assert set(range(30)) <= set(kept[:, head].tolist())
        assert set(range(120, 205)) <= set(kept[:, head].tolist())


def test_a_new_turn_is_not_cut(qwen3_tiny: str, golden_qwen3: Any, open_llm: Open) -> None:
    tokens = golden_qwen3["tokens"].tolist()
    cfg = tk.Compression(policy="knorm", target_tokens=100, trigger_tokens=200, n_recent=8, n_sink=4)
    llm = open_llm(qwen3_tiny, n_ctx=512, n_batch=64, compression=cfg)
    llm.eval(tokens[:180])
    assert llm.compressions == []
    llm.eval(tokens[180:330])
    assert [r.n_before for r in llm.compressions] == [180]
    assert llm.kv.positions(0)[-150:, 0].tolist() == list(range(180, 330))
    decode(llm, tokens[330:332])
