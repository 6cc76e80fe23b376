"""Sessions: what is loaded decodes as what was saved, bit by bit; what does not fit is refused and changes nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import decode, prompt, random_sets

import twinkv_edge as tk
from twinkv_edge.session import is_session

Q8_0 = 8


def ragged_sets(llm: tk.CompressedLlama) -> Any:
    """From 40 tokens on, every head more than the one before."""
    shape = llm.kv.n_layers, llm.kv.n_head_kv
    keep = 40 + np.arange(shape[0] * shape[1]).reshape(*shape, 1)
    return np.random.default_rng(3).random((*shape, llm.kv.n_cells)).argsort(axis=-1) < keep


def cell_sets(llm: tk.CompressedLlama) -> Any:
    return np.broadcast_to(random_sets(llm, 90)[:1, :1], random_sets(llm, 90).shape).copy()


SETS = {"head": lambda llm: random_sets(llm, 90), "cell": cell_sets, "ragged": ragged_sets, "whole": None}


@pytest.mark.parametrize("layout", SETS)
def test_round_trip_is_bit_exact(
    open_llm: Any, smollm2: str, qwen3_tiny: str, licence_tokens: Any, layout: str, tmp_path: Path
) -> None:
    model = smollm2 if layout == "head" else qwen3_tiny
    licence_tokens = [t % 500 for t in licence_tokens]
    kinds = {"type_k": Q8_0, "type_v": Q8_0}
    llm = open_llm(model, **kinds)
    llm.eval(licence_tokens[:200])
    if SETS[layout]:
        llm.kv.evict(SETS[layout](llm))
    llm.eval(licence_tokens[200:210])
    path = tmp_path / "a.twinkv"
    saved = tk.Session.save(llm, path, metadata={"name": "Füße"})
    positions = [llm.kv.positions(i) for i in range(llm.kv.n_layers)]
    expected = decode(llm, licence_tokens[210:218])

    smaller = open_llm(model, n_ctx=256, **kinds)
    smaller.eval(prompt(50))  # what was there goes
    loaded = tk.Session.load(smaller, path)
    assert [loaded.n_tokens, loaded.n_cells] == [210, saved.n_cells] == [smaller.n_tokens, smaller.kv.n_cells]
    assert loaded.metadata == {"name": "Füße"}
    assert loaded.tokens.tolist() == licence_tokens[:210] == smaller.input_ids[:210].tolist()
    assert smaller.kv.ragged == (layout == "ragged")
    for layer, there in enumerate(positions):
        np.testing.assert_array_equal(smaller.kv.positions(layer), there)
    np.testing.assert_array_equal(decode(smaller, licence_tokens[210:218]), expected)
    tk.Session.load(llm, path)  # and into the context it came from, which has gone on since
    np.testing.assert_array_equal(decode(llm, licence_tokens[210:218]), expected)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.twinkv"]


@pytest.mark.parametrize("kwargs", [{}, {"flash_attn": False}, {"type_k": Q8_0, "type_v": 1}], ids=str)
def test_other_caches(open_llm: Any, qwen3_tiny: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    llm = open_llm(qwen3_tiny, n_threads=1, **kwargs)
    llm.eval(prompt(100))
    llm.kv.evict(random_sets(llm, 40))
    tk.Session.save(llm, tmp_path / "a")
    expected = decode(llm, [5, 6, 7])
    other = open_llm(qwen3_tiny, n_threads=1, **kwargs)
    tk.Session.load(other, tmp_path / "a")
    np.testing.assert_array_equal(decode(other, [5, 6, 7]), expected)


def test_a_loaded_cache_goes_on_living(open_llm: Any, qwen3_tiny: str, tmp_path: Path) -> None:
    """It is evicted from again, in place, rolled back to its boundary, saved again, and protects what it did."""
    llm = open_llm(qwen3_tiny, n_threads=1)
    llm.protect(7)
    llm.eval(prompt(100))
    llm.kv.evict(random_sets(llm, 40))
    tk.Session.save(llm, tmp_path / "a")
    other = open_llm(qwen3_tiny, n_threads=1, n_ctx=256)
    tk.Session.load(other, tmp_path / "a")
    for each in (llm, other):
        each.eval(prompt(30, seed=1))
        report = each.compress(policy="knorm", repair="none", ratio=0.3, n_sink=0, n_recent=8)
        assert report.n_after == 49
        each.eval([9])
    np.testing.assert_array_equal(decode(llm, [5, 6, 7]), decode(other, [5, 6, 7]))
    assert other._rolling.n_protected == 7
    with pytest.raises(tk.CacheStateError, match="compressed"):
        other.kv.rollback(120)
    tk.Session.save(other, tmp_path / "a")
    assert tk.Session.load(llm, tmp_path / "a").n_tokens == 134


def test_generating_after_a_load(open_llm: Any, smollm2: str, licence_tokens: Any, tmp_path: Path) -> None:
    """The same prompt goes on where it was, without being read again."""
    tokens = licence_tokens[:150]
    said = []
    llm = open_llm(smollm2, type_k=Q8_0, type_v=Q8_0)
    llm.eval(tokens[:-1])
    llm.compress(policy="knorm", ratio=0.4)
    tk.Session.save(llm, tmp_path / "a")
    other = open_llm(smollm2, type_k=Q8_0, type_v=Q8_0)
    tk.Session.load(other, tmp_path / "a")
    for each in (llm, other):
        generated = each.generate(tokens, temp=0)
        said.append([next(generated) for _ in range(8)])
        assert each.kv.boundary == 149
    assert said[0] == said[1]


def refused(llm: tk.CompressedLlama, path: Path, match: str) -> None:
    """Loading is refused, and the cache, the tokens and the logits that follow are as they were."""
    n, cells, ids = llm.n_tokens, llm.kv.n_cells, llm.input_ids[: llm.n_tokens].tolist()
    with pytest.raises(tk.SessionError, match=match):
        tk.Session.load(llm, path)
    assert (llm.n_tokens, llm.kv.n_cells, llm.input_ids[: llm.n_tokens].tolist()) == (n, cells, ids)


def test_what_does_not_belong_together(
    open_llm: Any, qwen3_tiny: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(qwen3_tiny, n_threads=1, type_k=Q8_0)
    llm.eval(prompt(300))
    path = tmp_path / "a"
    tk.Session.save(llm, path)
    refused(open_llm(qwen3_tiny), path, "type_k=q8_0, type_v=f16")
    refused(open_llm(qwen3_tiny, n_ctx=256, type_k=Q8_0), path, "300 cells, and this context has 256.*n_ctx=556")
    refused(open_llm(qwen3_tiny, type_k=Q8_0, rope_freq_scale=0.5), path, "rotated otherwise")
    refused(open_llm(tiny("tiny-llama"), type_k=Q8_0), path, "another model")
    # one weight of many is another: same metadata, same size
    twin = tmp_path / "twin.gguf"
    raw = bytearray(Path(qwen3_tiny).read_bytes())
    raw[-1000] ^= 1
    twin.write_bytes(raw)
    refused(open_llm(str(twin), type_k=Q8_0), path, "another model")
    plain = tmp_path / "plain"
    llm = open_llm(qwen3_tiny, n_threads=1)
    llm.eval(prompt(20))
    tk.Session.save(llm, plain)
    refused(open_llm(qwen3_tiny, flash_attn=False), plain, "flash_attn=True")
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    refused(open_llm(qwen3_tiny, type_k=Q8_0), path, "rotated otherwise")


def test_copy_of_the_model_elsewhere_is_the_same(open_llm: Any, qwen3_tiny: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Path(qwen3_tiny).read_bytes())
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(20))
    tk.Session.save(llm, tmp_path / "a")
    assert tk.Session.load(open_llm(str(copy)), tmp_path / "a").n_tokens == 20


def test_saving_is_refused(open_llm: Any, qwen3_tiny: str, tmp_path: Path) -> None:
    llm = open_llm(qwen3_tiny)
    with pytest.raises(tk.CacheStateError, match="empty"):
        tk.Session.save(llm, tmp_path / "a")
    llm.eval(prompt(20))
    mine = tmp_path / "thesis.txt"
    mine.write_text("years of work")
    for path, match in (
        (mine, "is not a session"),
        (tmp_path, "not a file"),
        (tmp_path / "no" / "a", "no folder"),
        (Path("a\0b"), "cannot write"),
        (Path("/dev/null"), "not a file"),
    ):
        with pytest.raises(tk.InputError, match=match):
            tk.Session.save(llm, path)
    with pytest.raises(tk.InputError, match="JSON"):
        tk.Session.save(llm, tmp_path / "a", metadata={"a": object()})
    assert mine.read_text() == "years of work"
    assert os.listdir(tmp_path) == ["thesis.txt"]
    tk.Session.save(llm, mine, force=True)
    tk.Session.save(llm, mine)  # a session is replaced without asking
    assert is_session(mine)


@pytest.mark.parametrize("nameless", [True, False])
def test_an_error_while_writing_leaves_the_old_file(
    open_llm: Any, qwen3_tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(200))
    path = tmp_path / "a"
    tk.Session.save(llm, path)
    before = path.read_bytes()

    def fails(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    llm.eval(prompt(200))
    with pytest.raises(KeyboardInterrupt):
        tk.Session.save(llm, path, progress=fails)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(tk.InputError, match="no space left"):
            tk.Session.save(llm, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]
    link = tmp_path / "link"
    link.symlink_to(path)
    assert tk.Session.save(llm, link).n_tokens == tk.Session.read(path).n_tokens == 400
    assert link.is_symlink()


def test_sliding_window_model(open_llm: Any, tiny: Any, tmp_path: Path) -> None:
    """Its two caches go over. The sliding cells are put in another order, so logits move by the rounding of a sum."""
    llm = open_llm(tiny("tiny-gemma3"), type_k=Q8_0, type_v=Q8_0)
    llm.eval(prompt(300))
    llm.kv.evict(random_sets(llm, 60))
    tk.Session.save(llm, tmp_path / "a")
    other = open_llm(tiny("tiny-gemma3"), type_k=Q8_0, type_v=Q8_0)
    loaded = tk.Session.load(other, tmp_path / "a")
    assert loaded.contents.cache.n_caches == 2
    a, b = decode(llm, [5, 6, 7]), decode(other, [5, 6, 7])
    assert np.abs(a - b).max() < 0.01 * np.ptp(a)


def test_rope_that_depends_on_the_context(open_llm: Any, tiny: Any, tmp_path: Path) -> None:
    """LongRoPE rotates by other factors in a longer context: cached keys would be read as other positions."""
    short, long = (open_llm(tiny("tiny-phi3"), n_ctx=n) for n in (1024, 6144))
    for llm in (short, long):
        llm.eval(prompt(50))
    tk.Session.save(long, tmp_path / "a")
    if short.kv.layers[0].rotation == long.kv.layers[0].rotation:
        pytest.fail("the model does not show what is tested")
    refused(short, tmp_path / "a", "rotated otherwise")
