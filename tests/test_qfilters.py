"""Q-Filters: main directions of queries, kept per model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from cli_common import QUESTION, SHORT, runner
from conftest import layer_view, prompt

import twinkv_edge as tk
from twinkv_edge import calibrate, policies
from twinkv_edge.key_space import hadamard
from twinkv_edge.models.fingerprint import fingerprint

Q8_0 = llama_cpp.GGML_TYPE_Q8_0


@pytest.fixture(autouse=True)
def own_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen3_tiny: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def calibrated(llm: tk.CompressedLlama, path: Path, n: int = 700) -> calibrate.Filters:
    calibrate.calibrate(llm, prompt(n), path)
    return calibrate.load(path, fingerprint(llm.facts.path))


def test_they_are_the_first_singular_vectors(qwen3_tiny: str, tmp_path: Path, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    done: list[tuple[int, int]] = []
    path = calibrate.calibrate(llm, prompt(700), tmp_path / "f.npz", progress=lambda *x: done.append(x))
    assert done == [(512, 700), (700, 700)]
    assert llm.n_tokens == 0
    filters = calibrate.load(path, fingerprint(qwen3_tiny))
    assert filters.directions.shape == (4, 2, 64)
    assert filters.n_tokens == 700
    llm.capture_for(policies.SnapKV(window=700))
    llm.eval(prompt(700))
    queries, _ = layer_view(llm, 2).last_queries(700)
    for head in range(2):
        mains = []
        for q in queries[:, 4 * head : 4 * head + 4].transpose(1, 0, 2):
            main = np.linalg.svd(q, full_matrices=False)[2][0]
            mains.append(main * np.sign(main @ q.mean(axis=0)))
        expected = np.mean(mains, axis=0)
        np.testing.assert_allclose(filters.directions[2, head], expected / np.linalg.norm(expected), atol=2e-3)


def test_long_texts_are_read_in_stretches(
    qwen3_tiny: str, tmp_path: Path, open_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CONTEXT", 600)
    filters = calibrated(open_llm(qwen3_tiny), tmp_path / "f.npz", 1500)
    assert np.linalg.norm(filters.directions, axis=-1) == pytest.approx(1, abs=1e-5)


def test_the_cache_type_does_not_matter(qwen3_tiny: str, tmp_path: Path, open_llm: Callable[..., Any]) -> None:
    """Filters of a quantized cache have its Hadamard product taken off, and scores of one put it on again."""
    plain, quantized = open_llm(qwen3_tiny), open_llm(qwen3_tiny, type_k=Q8_0, type_v=Q8_0)
    assert quantized.kv.layers[0].rotation.hadamard == 64
    a, b = (calibrated(llm, tmp_path / f"{i}.npz").directions for i, llm in enumerate((plain, quantized)))
    assert (a * b).sum(axis=-1).min() > 0.99
    options = {"filters": str(tmp_path / "0.npz")}
    scores = [tk.score(llm, prompt(300, seed=3), policy="qfilters", **options) for llm in (plain, quantized)]
    assert np.corrcoef(scores[0].ravel(), scores[1].ravel())[0, 1] > 0.99
    keys = plain.kv.keys(1).transpose(1, 0, 2)
    np.testing.assert_allclose(scores[0][1], np.einsum("hnd,hd->hn", keys, a[1]), rtol=1e-4, atol=1e-4)


def test_kept_by_model(qwen3_tiny: str, tiny: Callable[[str], str], open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    with pytest.raises(tk.InputError, match="twinkv-edge calibrate"):
        llm.compression = tk.Compression(policy="qfilters")
    assert llm.compression.policy == tk.Compression().policy
    with pytest.raises(tk.InputError, match="twinkv-edge calibrate"):
        open_llm(qwen3_tiny, compression=tk.Compression(policy="qfilters"))
    path = calibrate.calibrate(llm, prompt(300))
    assert path.stat().st_size < 10_000
    llm.compression = tk.Compression(policy="qfilters")
    llm.eval(prompt(300))
    assert llm.compress().n_after == 150
    other = open_llm(tiny("tiny-qwen3"))
    with pytest.raises(tk.InputError, match="another model's"):
        other.capture_for(tk.Compression(policy="qfilters", policy_options={"filters": str(path)}))
    other.capture_for("adakv")
    with pytest.raises(tk.InputError, match="twinkv-edge calibrate"):
        other.capture_for(tk.Compression(policy="adakv", policy_options={"base": "qfilters"}))


def test_files_that_are_none(qwen3_tiny: str, tmp_path: Path, open_llm: Callable[..., Any]) -> None:
    llm = open_llm(qwen3_tiny)
    with pytest.raises(tk.InputError, match="too few"):
        calibrate.calibrate(llm, prompt(100))
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK but not really")
    with pytest.raises(tk.InputError, match="no file of Q-Filters"):
        calibrate.load(bad, "")
    np.savez(bad, other=1)
    with pytest.raises(tk.InputError, match="no file of Q-Filters"):
        calibrate.load(bad, "")
    with pytest.raises(tk.InputError, match="cannot be written"):
        calibrate.calibrate(llm, prompt(300), Path("/proc/nowhere/f.npz"))
    assert not list(tmp_path.glob("*.tmp"))


def test_the_hadamard_matrix_is_its_own_inverse() -> None:
    h = hadamard(64, 128)
    np.testing.assert_allclose(h @ h, np.eye(128), atol=1e-12)
    np.testing.assert_array_equal(h, h.T)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`twinkv-edge calibrate TEXT`, and the policy finds what it left."""
    run = runner(capsys, monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text(SHORT * 4, encoding="utf-8")
    done = run("calibrate", str(text), "--json")
    assert done.code == 0, done.out
    assert {k: done.json[k] for k in ("layers", "heads", "dims")} == {"layers": 30, "heads": 3, "dims": 64}
    assert Path(done.json["path"]).parent == tmp_path / "cache" / "twinkv-edge" / "qfilters"
    document = tmp_path / "document.txt"
    document.write_text(SHORT, encoding="utf-8")
    answer = run("ask", str(document), QUESTION, "--policy", "qfilters", "--max-tokens", "4", "--json")
    assert answer.json["compression"]["policy"] == "qfilters"
    assert answer.json["compression"]["n_after"] < answer.json["compression"]["n_before"]


def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(capsys, monkeypatch)
    short = tmp_path / "short.txt"
    short.write_text("Too little.", encoding="utf-8")
    assert "too few" in run("calibrate", str(short)).err
    short.write_text(SHORT * 4, encoding="utf-8")
    assert "is no folder" in run("calibrate", str(short), "-o", str(tmp_path / "no" / "f.npz")).err
