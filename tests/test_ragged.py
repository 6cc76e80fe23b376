"""Heads and layers that keep different numbers of tokens: exact, whatever happens to the cache afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import cache_scores, decode, hide, masked_run, prompt

import twinkv_edge as tk
from twinkv_edge import pipeline

Q8_0, Q4_0 = llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0
SETTINGS: dict[str, dict[str, Any]] = {
    "q8_0": {"type_k": Q8_0, "type_v": Q8_0},
    "q4_0": {"type_k": Q4_0, "type_v": Q4_0},
    "f16": {"n_threads": 1, "n_threads_batch": 1},
}


def ragged_sets(llm: tk.CompressedLlama, least: int, most: int, seed: int = 0) -> np.ndarray:
    """A random set of random size for every layer and head, bool [L, H, n]."""
    rng = np.random.default_rng(seed)
    shape = (llm.kv.n_layers, llm.kv.n_head_kv, llm.kv.n_cells)
    sizes = rng.integers(least, most + 1, shape[:2])
    sizes[1, 0], sizes[0, 1] = most, least
    return rng.random(shape).argsort(axis=-1) < sizes[..., None]


def check_positions(llm: tk.CompressedLlama, before: list[np.ndarray], retained: np.ndarray) -> None:
    for layer, (was, kept) in enumerate(zip(before, retained, strict=True)):
        now = llm.kv.positions(layer)
        for head in range(llm.kv.n_head_kv):
            expected = was[kept[head], head]
            expected = expected[expected >= 0]
            np.testing.assert_array_equal(now[: expected.size, head], expected)
            assert (now[expected.size : llm.kv.n_compressed_cells, head] == -1).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_ragged_sets_equal_masking(
    setting: str, smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, **SETTINGS[setting])
    llm.eval(licence_tokens[:560])
    retained = ragged_sets(llm, 20, 300)
    before = [llm.kv.positions(layer) for layer in range(30)]
    expected = masked_run(llm, retained, licence_tokens[560:566])
    report = llm.kv.evict(retained)
    assert (report.n_after, report.n_tokens) == (300, 560)
    assert report.n_after_mean == pytest.approx(retained.sum(axis=-1).mean())
    check_positions(llm, before, retained)
    np.testing.assert_array_equal(decode(llm, licence_tokens[560:566]), expected)


@pytest.fixture
def compressed(qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama]) -> tk.CompressedLlama:
    """400 tokens, of which heads keep 30 to 200, and 30 more."""
    llm = open_llm(qwen3_tiny, **SETTINGS["q8_0"])
    llm.eval(prompt(400))
    llm.kv.evict(ragged_sets(llm, 30, 200))
    llm.eval(prompt(30, seed=1))
    return llm


def test_a_head_that_keeps_everything(qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama]) -> None:
    """No cell is free for all heads, so llama.cpp keeps all of them."""
    llm = open_llm(qwen3_tiny, **SETTINGS["q8_0"])
    llm.eval(prompt(300))
    retained = ragged_sets(llm, 30, 300)
    before = [llm.kv.positions(layer) for layer in range(4)]
    expected = masked_run(llm, retained, prompt(6, seed=2))
    assert llm.kv.evict(retained).n_after == 300
    check_positions(llm, before, retained)
    np.testing.assert_array_equal(decode(llm, prompt(6, seed=2)), expected)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_batches_after_a_ragged_eviction(
    flash_attn: bool, qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(qwen3_tiny, flash_attn=flash_attn, n_threads=1, n_threads_batch=1)
    llm.eval(prompt(300))
    retained = ragged_sets(llm, 30, 150)
    hide(llm, retained)
    llm.eval(prompt(90, seed=1))
    expected = decode(llm, prompt(3, seed=2))
    hide(llm, None)
    llm.n_tokens = 300
    llm._follow()
    llm.kv.evict(retained)
    llm.eval(prompt(90, seed=1))
    got = decode(llm, prompt(3, seed=2))
    np.testing.assert_allclose(got, expected, atol=2e-3 * np.ptp(expected))


def test_taking_tokens_back(compressed: tk.CompressedLlama) -> None:
    llm = compressed
    expected = decode(llm, prompt(5, seed=2))
    llm.n_tokens = 400
    llm._follow()
    llm.eval(prompt(30, seed=1))
    np.testing.assert_array_equal(decode(llm, prompt(5, seed=2)), expected)
    with pytest.raises(tk.CacheStateError, match="compressed as a whole"):
        llm.kv.rollback(399)


def test_evicting_again_equals_masking(compressed: tk.CompressedLlama) -> None:
    llm = compressed
    second = ragged_sets(llm, 25, 60, seed=3)
    visible = [llm.kv.positions(layer).T >= 0 for layer in range(4)]
    for layer in range(4):
        second[layer] &= visible[layer]
        second[layer, :, -1] = True
    before = [llm.kv.positions(layer) for layer in range(4)]
    following = prompt(5, seed=4)
    n = llm.n_tokens
    hide(llm, second)
    expected = decode(llm, following)
    llm.n_tokens = n
    llm._follow()
    llm.kv.evict(second)
    check_positions(llm, before, second)
    np.testing.assert_array_equal(decode(llm, following), expected)


def test_marks_on_hidden_cells_mean_nothing(compressed: tk.CompressedLlama) -> None:
    llm = compressed
    before = [llm.kv.positions(layer) for layer in range(4)]
    keys = llm.kv.keys(2)
    report = llm.kv.evict(np.ones((4, 2, llm.kv.n_cells), dtype=np.bool_))
    assert report.n_after == report.n_before == 230
    for layer in range(4):
        np.testing.assert_array_equal(llm.kv.positions(layer), before[layer])
    np.testing.assert_array_equal(llm.kv.keys(2), keys)


def test_saving_and_loading(compressed: tk.CompressedLlama) -> None:
    llm = compressed
    state = llm.save_state()
    positions = [llm.kv.positions(layer) for layer in range(4)]
    expected = decode(llm, prompt(5, seed=2))
    llm.reset()
    llm.eval(prompt(250, seed=5))
    llm.load_state(state)
    for layer in range(4):
        np.testing.assert_array_equal(llm.kv.positions(layer), positions[layer])
    np.testing.assert_array_equal(decode(llm, prompt(5, seed=2)), expected)


def test_moving_to_another_context(compressed: tk.CompressedLlama) -> None:
    llm = compressed
    expected = decode(llm, prompt(5, seed=2))
    llm.n_tokens = 430
    llm._follow()
    llm.move_to_context(256)
    np.testing.assert_array_equal(decode(llm, prompt(5, seed=2)), expected)


def test_nothing_is_hidden_after_reset(
    compressed: tk.CompressedLlama, qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    compressed.reset()
    fresh = open_llm(qwen3_tiny, **SETTINGS["q8_0"])
    for llm in (compressed, fresh):
        llm.eval(prompt(300, seed=7))
    np.testing.assert_array_equal(decode(compressed, prompt(3)), decode(fresh, prompt(3)))


def test_memory_of_unused_rows_comes_back(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """Layers that keep less than the others give back the rows in between: bytes in use say so, and pages are free."""
    llm = open_llm(smollm2, n_ctx=2048)
    llm.eval(licence_tokens)
    budgets = np.linspace(1000, 100, 30).astype(int)
    retained = np.broadcast_to(np.arange(1200) >= 1200 - budgets[:, None, None], (30, 3, 1200)).copy()
    llm.kv.evict(retained)
    after, cell = llm.footprint(), 2 * 3 * 64 * 2
    assert after.cells == 1000
    assert after.bytes_used == budgets.sum() * cell
    assert after.bytes_resident <= after.bytes_used + 30 * 2 * 2 * 4096
    state = llm.save_state()  # reads every row
    llm.load_state(state)
    assert llm.footprint().bytes_resident <= after.bytes_used + 30 * 2 * 2 * 4096


def test_refusals(qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama], monkeypatch: Any) -> None:
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(200))
    retained = ragged_sets(llm, 10, 50)
    empty = retained.copy()
    empty[2, 1] = False
    with pytest.raises(tk.InputError, match="retains nothing"):
        llm.kv.evict(empty)
    monkeypatch.setattr(tk.KVCache, "can_hide", False)
    with pytest.raises(tk.UnsupportedModelError, match="host memory"):
        llm.kv.evict(retained)
    assert llm.kv.n_cells == 200


# -- policies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Of the embedded model: heads that retrieve here and there."""
    path = tmp_path / "full_attention_heads.tsv"
    rows = np.random.default_rng(0).random((30, 3))
    path.write_text("\n".join("\t".join(f"{x:.4f}" for x in row) for row in rows))
    return str(path)


OPTIONS: dict[str, dict[str, Any]] = {
    "pyramidkv": {},
    "adakv": {},
    "chunkkv": {"base": "knorm"},
    "expected_attention": {"head_adaptive": True},
    "duo_attention": {"sink": 4, "recent": 100},
}


@pytest.mark.parametrize("policy", OPTIONS)
def test_policies_with_their_own_budgets(
    policy: str, pattern: str, smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    """The total is what the ratio says, the repair leaves every head its budget, and evicting equals masking, bit for
    bit."""
    options = {**OPTIONS[policy], **({"pattern": pattern} if policy == "duo_attention" else {})}
    cfg = tk.Compression(policy=policy, ratio=0.5, repair="none", n_recent=32, policy_options=options)
    llm = open_llm(smollm2, compression=cfg, **SETTINGS["q8_0"])
    llm.eval(licence_tokens[:512])
    plain = pipeline.make_plan(llm.kv, cfg, llm.tau)
    plan = pipeline.make_plan(llm.kv, cfg.with_(repair="paper"), 0.8)
    budgets = plan.retained.sum(axis=-1)
    np.testing.assert_array_equal(budgets, plain.retained.sum(axis=-1))
    assert plan.swaps > 0
    assert plan.notes == []
    if policy == "chunkkv":
        assert budgets.sum() <= 256 * 90
    else:
        assert budgets.sum() == 256 * 90
        assert budgets.min() < budgets.max()
    always = np.r_[0:4, 480:512]
    assert plan.retained[..., always].all()
    expected = masked_run(llm, plan.retained, licence_tokens[512:518])
    report = pipeline.carry_out(llm.kv, plan, cfg, llm.tau)
    assert report.n_after == budgets.max()
    np.testing.assert_array_equal(decode(llm, licence_tokens[512:518]), expected)


def test_pyramidkv_budgets_are_those_of_the_peer(golden: Any) -> None:
    from twinkv_edge.policies.pyramidkv import layer_budgets

    for ratio, keep in ((30, 840), (50, 600), (70, 360)):
        np.testing.assert_array_equal(layer_budgets(1200, keep, 30, 64, 20), golden[f"pyramidkv_layer_budget_r{ratio}"])


@pytest.mark.parametrize("n", [65, 100, 129, 700, 1201])
@pytest.mark.parametrize("n_layers", [1, 2, 7, 36])
def test_pyramidkv_budgets_keep_the_total(n: int, n_layers: int) -> None:
    from twinkv_edge.policies.pyramidkv import layer_budgets

    for keep in {1, 30, n // 3, n // 2, n - 10, n - 1}:
        for least in (0, 30, 68):
            budgets = layer_budgets(n, keep, n_layers, 64, 20, least)
            assert budgets.sum() == keep * n_layers
            assert budgets.min() >= min(least, keep)
            assert budgets.max() <= n
            assert (np.diff(budgets) <= 0).all()


@pytest.mark.parametrize("ratio", [30, 50, 70])
def test_adakv_keeps_what_the_peer_keeps(ratio: int, evaluated: tk.CompressedLlama, golden: Any) -> None:
    cfg = tk.Compression(policy="adakv", ratio=ratio / 100, repair="none", n_sink=0, n_recent=0)
    kept = pipeline.make_plan(evaluated.kv, cfg, 0.9).retained
    peer = np.unpackbits(golden[f"adakv_snapkv_keep_r{ratio}"], axis=-1)[..., :1200].astype(bool)
    assert kept.sum() == peer.sum()
    assert (kept == peer).mean() >= 0.97
    np.testing.assert_array_equal(kept.sum(axis=(1, 2)), peer.sum(axis=(1, 2)))


@pytest.mark.parametrize("ratio", [30, 50, 70])
def test_chunkkv_counts_are_those_of_the_peer(ratio: int, evaluated: tk.CompressedLlama, golden: Any) -> None:
    cfg = tk.Compression(policy="chunkkv", ratio=ratio / 100, repair="none", n_sink=0, n_recent=0)
    kept = pipeline.make_plan(evaluated.kv, cfg, 0.9).retained
    np.testing.assert_array_equal(kept.sum(axis=-1)[:, 0], golden[f"chunkkv_snapkv_n_kept_r{ratio}"])
    chunks = kept.reshape(30, 3, 60, 20)
    assert (chunks.all(axis=-1) | ~chunks.any(axis=-1)).all()
    assert (chunks == chunks[:, :1]).all()


def test_chunks_are_whole_around_protected_tokens(evaluated: tk.CompressedLlama) -> None:
    cfg = tk.Compression(policy="chunkkv", ratio=0.5, repair="none", n_sink=4, n_recent=70)
    kept = pipeline.make_plan(evaluated.kv, cfg, 0.9).retained.reshape(30, 3, 60, 20)
    assert (kept.all(axis=-1) | ~kept.any(axis=-1)).all()
    assert kept[:, :, [0, 56, 57, 58, 59]].all()


def test_duo_attention_files(tmp_path: Path, pattern: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    with pytest.raises(tk.InputError, match="needs a pattern file"):
        tk.policies.create("duo_attention")
    with pytest.raises(tk.InputError, match="cannot be read"):
        tk.policies.create("duo_attention", {"pattern": tmp_path / "missing.tsv"})
    bad = tmp_path / "bad.tsv"
    for text in ("", "1 2\n3", "a b", "nan 1"):
        bad.write_text(text)
        with pytest.raises(tk.InputError, match="table of numbers"):
            tk.policies.create("duo_attention", {"pattern": bad})
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(300))
    with pytest.raises(tk.InputError, match="30 x 3, but this model has 4 layers of 2 KV heads"):
        llm.compress(policy="duo_attention", policy_options={"pattern": pattern})


def test_duo_attention_shares_out_the_budget() -> None:
    from twinkv_edge.policies.duo_attention import share_out

    pattern = np.array([[0.1, 0.9], [0.5, 0.3]], dtype=np.float32)
    budgets = share_out(pattern, n=100, keep=50, streaming=20)
    # 200 in all; everyone's 20 leave 120: 80 fill up the first head, 40 go to the next
    assert budgets.tolist() == [[20, 100], [60, 20]]


# -- where budgets must be even --------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["device", "cell", "bounded", "trigger", "again"])
def test_even_budgets_and_why(why: str, qwen3_tiny: str, open_llm: Callable[..., Any], monkeypatch: Any) -> None:
    changes, reason = {
        "device": ({}, "host memory"),
        "cell": ({"layout": "cell"}, "one set for all"),
        "bounded": ({"prefill": "bounded", "target_tokens": 200}, "by itself"),
        "trigger": ({"trigger_tokens": 900}, "by itself"),
        "again": ({}, "unevenly before"),
    }[why]
    llm = open_llm(qwen3_tiny, n_batch=64, compression=tk.Compression(policy="adakv"))
    llm.eval(prompt(400))
    if why == "again":
        assert llm.compress().notes == ()
        llm.eval(prompt(100, seed=1))
    if why == "device":
        monkeypatch.setattr(tk.KVCache, "can_hide", False)
    before = [(llm.kv.positions(layer) >= 0).sum(axis=0) for layer in range(4)]
    with pytest.warns(UserWarning, match=reason):
        report = llm.compress(**changes)
    assert reason in report.notes[0]
    after = [(llm.kv.positions(layer) >= 0).sum(axis=0) for layer in range(4)]
    if why == "again":
        assert [a.tolist() for a in after] == [np.maximum(68, np.ceil(b / 2)).tolist() for b in before]
    else:
        assert (np.array(after) == 200).all()


@pytest.mark.parametrize("policy", ["snapkv", "tova", "expected_attention", "h2o", "knorm", "keydiff", "twinkv"])
def test_every_policy_scores_an_uneven_cache(policy: str, qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    """Hidden cells are nobody's business: they score nothing, and the others score."""
    llm = open_llm(qwen3_tiny, compression=tk.Compression(policy=policy), **SETTINGS["q8_0"])
    llm.eval(prompt(400))
    llm.kv.evict(ragged_sets(llm, 80, 200))
    llm.eval(prompt(100, seed=1))
    scores = cache_scores(llm, policy)
    hidden = np.stack([llm.kv.positions(layer).T < 0 for layer in range(4)])
    assert (np.isneginf(scores) == hidden).all()
    for mode in ("none", "paper", "consistent", "coverage"):
        plan = pipeline.make_plan(llm.kv, llm.compression.with_(repair=mode), 0.8)
        assert not plan.retained[hidden].any()
    report = llm.compress(repair="paper", tau=0.8)
    assert report.n_before == 300
    assert (llm.kv.positions(0)[-64:] == np.arange(436, 500)[:, None]).all() or llm.kv.ragged
    assert np.isfinite(decode(llm, prompt(3))).all()


def test_a_third_party_that_gives_too_much(qwen3_tiny: str, open_llm: Callable[..., Any]) -> None:
    class Greedy(tk.policies.Policy):
        name, summary, ragged = "test_greedy", "gives too much", True

        def __init__(self, extra: int = 1) -> None:
            self.extra = extra

        def score(self, layer: tk.policies.LayerView) -> np.ndarray:
            return layer.positions.astype(np.float32)

        def budgets(self, layer: Any, scores: Any, keep: int, always: Any) -> np.ndarray:
            return np.full(2, keep + self.extra)

    tk.policies.register(Greedy)
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(200))
    with pytest.raises(tk.InputError, match="8 tokens more than the ratio leaves them"):
        llm.compress(policy="test_greedy")
    with pytest.raises(tk.InputError, match="must keep its 68 protected tokens"):
        llm.compress(policy="test_greedy", policy_options={"extra": -50})
    assert llm.kv.n_cells == 200
