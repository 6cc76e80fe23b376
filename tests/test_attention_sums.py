"""The attention every key received, summed as the graph runs, against attention computed outright."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import hide, layer_view, prompt, random_sets

import twinkv_edge as tk
from twinkv_edge import policies
from twinkv_edge._install import native

Q8_0 = llama_cpp.GGML_TYPE_Q8_0


@pytest.fixture
def portable() -> Iterator[Callable[[str], None]]:
    """Chooses a kernel; the best one is back afterwards."""
    yield native.set_attention_isa
    for isa in ("portable", "avx2", "avx512"):
        if runs(isa):
            native.set_attention_isa(isa)


def runs(isa: str) -> bool:
    try:
        native.set_attention_isa(isa)
    except tk.InputError:
        return False
    return True


def outright(llm: tk.CompressedLlama, index: int, hidden: np.ndarray | None = None) -> np.ndarray:
    """Softmax of every captured query over every key it may see, summed: float64 [H, n]."""
    layer = layer_view(llm, index)
    queries, positions = layer.last_queries(65536)
    assert len(positions) == llm.n_tokens
    out = np.zeros(layer.positions.shape)
    for head in range(len(out)):
        keys, q = layer.keys[head].astype(np.float64), queries[:, head * layer.group : (head + 1) * layer.group]
        logits = np.einsum("tgd,nd->tgn", q.astype(np.float64), keys) * layer.kq_scale
        shut = layer.positions[head][None, :] > positions[:, None]
        if hidden is not None:
            shut |= hidden[head][None, :]
        logits = np.where(shut[:, None], -np.inf, logits)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[head] = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
    return out


def sums(llm: tk.CompressedLlama, index: int) -> np.ndarray:
    return layer_view(llm, index).attention


EVERYTHING = (policies.SnapKV(window=4096), "h2o")


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("n", [1, 31, 33, 255, 257, 700])
def test_against_attention_outright(
    isa: str, n: int, portable: Callable[[str], None], qwen3_tiny: str, open_llm: Callable[..., Any]
) -> None:
    if not runs(isa):
        pytest.skip(f"no {isa} here")
    llm = open_llm(qwen3_tiny)
    llm.capture_for(*EVERYTHING)
    llm.eval(prompt(n))
    for index in (0, 3):
        np.testing.assert_allclose(sums(llm, index), outright(llm, index), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("setting", [{}, {"type_k": Q8_0, "type_v": Q8_0}, {"flash_attn": False}])
@pytest.mark.parametrize("like", ["tiny-mqa", "tiny-mha", "tiny-llama3"])
def test_cache_types_and_groups(
    setting: dict[str, Any], like: str, tiny: Callable[[str], str], open_llm: Callable[..., Any]
) -> None:
    llm = open_llm(tiny(like), n_ctx=512, **setting)
    llm.capture_for(*EVERYTHING)
    llm.eval(prompt(300))
    for index in range(2):
        np.testing.assert_allclose(sums(llm, index), outright(llm, index), rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_tokens_one_by_one(flash_attn: bool, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """Single tokens wait until there are enough of them for a block; nobody can tell."""
    llm = open_llm(qwen3_tiny, flash_attn=flash_attn)
    llm.capture_for(*EVERYTHING)
    tokens = prompt(150)
    llm.eval(tokens[:60])
    for token in tokens[60:]:
        llm.eval([token])
    np.testing.assert_allclose(sums(llm, 2), outright(llm, 2), rtol=5e-3, atol=1e-5)
    assert sums(llm, 2).sum() == pytest.approx(8 * 150, rel=1e-5)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_tokens_taken_back(flash_attn: bool, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, flash_attn=flash_attn)
    llm.capture_for("h2o")
    tokens = prompt(300)
    llm.eval(tokens[:200])
    expected = sums(llm, 1)

    def takes_back(*batches: int) -> None:
        for size in batches:
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + size])
        llm.n_tokens = 200
        llm._follow()

    for batches in ([1] * 20, [40], [40, *[1] * 20], [64]):
        takes_back(*batches)
        np.testing.assert_allclose(sums(llm, 1), expected, rtol=1e-4, atol=1e-4)
    takes_back(65)  # one more than is held
    with pytest.raises(tk.CacheStateError, match="attention of all 200 tokens, and that of 0 was captured"):
        sums(llm, 1)


def test_evicted_cells_take_their_sums_with_them(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """Sums move with their cells, and go on growing there."""
    llm = open_llm(qwen3_tiny, type_k=Q8_0, type_v=Q8_0)
    llm.capture_for("h2o")
    tokens = prompt(400)
    llm.eval(tokens[:300])
    llm.eval(tokens[300:305])  # a few that wait
    retained = random_sets(llm, keep=100)
    before = [sums(llm, index) for index in range(4)]
    llm.kv.evict(retained)
    for index in range(4):
        np.testing.assert_array_equal(sums(llm, index), before[index][retained[index]].reshape(2, 100))
    llm.eval(tokens[305:])
    for index in range(4):
        after = sums(llm, index)
        assert after.shape == (2, 195)
        grown = after[:, :100] - before[index][retained[index]].reshape(2, 100)
        assert (grown > 0).all()
        # 95 queries of 4 heads each gave all their attention to what was left, and to themselves
        assert (grown.sum() + after[:, 100:].sum()) == pytest.approx(2 * 4 * 95, rel=1e-4)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_hidden_cells_receive_nothing(flash_attn: bool, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny, flash_attn=flash_attn)
    llm.capture_for(*EVERYTHING)
    llm.eval([5])  # the layers are known, nothing is hidden yet
    llm.reset()
    retained = np.random.default_rng(0).random((4, 2, 200)) < 0.5
    retained[:, :, 0] = True
    hide(llm, retained)
    llm.eval(prompt(300))
    hidden = np.concatenate([~retained[1], np.zeros((2, 100), dtype=bool)], axis=1)
    assert (sums(llm, 1)[hidden] == 0).all()
    np.testing.assert_allclose(sums(llm, 1), outright(llm, 1, hidden), rtol=5e-3, atol=1e-5)


PEAK = """
import json, resource, sys
import numpy as np
import twinkv_edge as tk
path, n, policy = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = tk.CompressedLlama(path, n_ctx=n, n_threads=2)
if policy != "none":
    llm.capture_for(policy)
llm.eval(np.random.default_rng(0).integers(1, 500, n).tolist())
if policy != "none":
    tk.pipeline.scores(llm.kv, tk.policies.create(policy))
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


def peak_kb(path: str, n: int, policy: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, str(n), policy], capture_output=True, check=True, text=True
    )
    return int(json.loads(done.stdout))


@pytest.mark.slow
def test_memory_grows_with_the_length_not_its_square(tiny: Callable[[str], str]) -> None:
    """16K tokens, 2 layers of 4 query heads: one n x n matrix of floats would be 1 GB."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    path = tiny("tiny-llama")
    extra = {n: peak_kb(path, n, "h2o") - peak_kb(path, n, "none") for n in (8192, 16384)}
    assert extra[16384] < 64 * 1024
    assert extra[16384] < 2.5 * max(extra[8192], 4096)
