"""What `inspect` gathers, against slow and plain computations, and what the command says."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cli_common import SHORT, Run, runner
from conftest import prompt

import twinkv_edge as tk
from twinkv_edge import pipeline
from twinkv_edge.backends.numpy import normalize, similarity
from twinkv_edge.inspect import gather, nearest
from twinkv_edge.inspect.payload import NONE, STEPS, pack, payload, pieces, quantized
from twinkv_edge.inspect.render import render
from twinkv_edge.inspect.roles import IN_CACHE, Role


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_nearest_twins_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(2, 12, 16))
    keys = (centres[:, rng.integers(0, 12, 300)] + 0.33 * rng.normal(size=(2, 300, 16))).astype(np.float32)
    positions = np.sort(rng.choice(900, (2, 300), replace=False), axis=1).astype(np.int32)
    tau, window, most = 0.9, 40, 3
    counts = tk.twin_counts(keys, tau, window, positions=positions)
    found = nearest.nearest(keys, counts, positions, window, most)
    assert 0 < np.count_nonzero(counts) < counts.size  # tokens with twins and without
    at = 0
    for head in range(2):
        sims = similarity(*[normalize(keys[head])[0]] * 2)
        sims[np.abs(positions[head, :, None] - positions[head]) <= window] = -2
        for token in range(300):
            best = np.argsort(-sims[token], kind="stable")[: min(most, counts[head, token])]
            here = slice(at, at + int(found.lengths[head, token]))
            assert found.tokens[here].tolist() == best.tolist()
            np.testing.assert_allclose(found.similarities[here], sims[token, best], atol=1e-5)
            at = here.stop
    assert at == found.tokens.size


@pytest.mark.parametrize("layout", ["head", "cell"])
def test_roles_follow_from_the_plans(qwen3_tiny: str, open_llm, layout: str) -> None:  # type: ignore[no-untyped-def]
    llm = open_llm(qwen3_tiny)
    settings = [
        tk.Compression(policy=p, ratio=0.6, n_recent=16, tau=0.5, layout=layout, repair="paper")  # type: ignore[arg-type]
        for p in ("knorm", "snapkv")
    ]
    llm.capture_for(*settings)
    llm.eval(prompt(200))
    seen: list[int] = []
    found = gather(llm, settings, lambda done, total: seen.append(done))
    assert llm.kv.n_cells == 200  # nothing was evicted
    assert seen == sorted(seen)
    assert seen[-1] == llm.kv.n_layers * 8
    for result in found.policies:
        alone = pipeline.make_plan(llm.kv, result.settings.with_(repair="none"), 0.5).retained
        plan = pipeline.make_plan(llm.kv, result.settings, 0.5)
        assert (result.retained == plan.retained).all()
        roles = result.roles
        assert ((roles == Role.SWAPPED_IN) == (plan.retained & ~alone)).all()
        assert ((roles == Role.SWAPPED_OUT) == (alone & ~plan.retained)).all()
        assert plan.swaps > 0
        for layer in range(llm.kv.n_layers):
            keys = np.ascontiguousarray(llm.kv.keys(layer).transpose(1, 0, 2))
            best = tk.best_twin(keys, alone[layer], 32)
            lost = ~alone[layer] & ~plan.retained[layer] & (best < np.float32(0.5))
            assert ((roles[layer] == Role.ORPHAN) == lost).all()
            assert (found.counts[layer] == tk.twin_counts(keys, 0.5, 32)).all()
        if layout == "head":
            assert (roles == Role.ORPHAN).sum() + (roles == Role.SWAPPED_IN).sum() == plan.orphans == result.lost_before
            assert (roles == Role.DONOR).sum() + (roles == Role.SWAPPED_OUT).sum() == plan.donors
    summary = found.summary()
    assert json.loads(json.dumps(summary)) == summary
    for result, shown in zip(found.policies, summary["policies"], strict=True):
        assert shown["retention"] == pytest.approx(result.retained.mean())
        assert np.sum(shown["roles_by_layer"]) == result.roles.size
        report = llm.kv.evict(result.retained)
        assert report.bytes_before == found.bytes_before
        assert report.bytes_after == shown["bytes_after"]
        break  # a cache is evicted from once


def test_gather_wants_a_whole_cache(qwen3_tiny: str, open_llm) -> None:  # type: ignore[no-untyped-def]
    llm = open_llm(qwen3_tiny)
    cfg = tk.Compression(policy="knorm")
    with pytest.raises(tk.CacheStateError, match="empty"):
        gather(llm, [cfg])
    llm.eval(prompt(200))
    with pytest.raises(tk.InputError, match="at one tau"):
        gather(llm, [cfg, cfg.with_(policy="keydiff", tau=0.5)])
    llm.compress(cfg)
    with pytest.raises(tk.CacheStateError, match="compressed already"):
        gather(llm, [cfg])


class Bytes:
    """A vocabulary of single bytes; 256 is a control token."""

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def is_control(self, token: int) -> bool:
        return token == 256

    def text(self, token: int) -> str:
        return "<end>"


@pytest.mark.parametrize(
    ("tokens", "expected", "control"),
    [
        ("é🙂".encode(), ["", "é", "", "", "", "🙂"], []),
        ([0xC3, 256, 0x61], ["\ufffd", "<end>", "a"], [1]),  # half a character never swallows what follows
        ([0x61, 0xF0, 0x9F], ["a", "", "\ufffd"], []),
    ],
)
def test_pieces_put_characters_together(tokens: Sequence[int], expected: list[str], control: list[int]) -> None:
    assert pieces(Bytes(), list(tokens)) == (expected, control)


def test_similarities_never_round_up() -> None:
    values = np.array([0.9, np.nextafter(np.float32(0.9), np.float32(0)) - 1e-3, 1, -0.3, -1, 0.8549], np.float32)
    assert quantized(values).tolist() == [180, 179, STEPS, 0, NONE, 170]
    packed = pack(np.array([1, 515], np.uint16))
    assert zlib.decompress(base64.b64decode(packed)) == b"\1\0\3\2"


def test_text_stays_data(qwen3_tiny: str, open_llm) -> None:  # type: ignore[no-untyped-def]
    llm = open_llm(qwen3_tiny)
    llm.eval(prompt(80))
    found = gather(llm, [tk.Compression(policy="knorm", n_recent=8)])
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;'\"\u2028"
    about = {"title": evil, "chips": [evil], "version": "1"}
    page = render(payload(found, [evil] * 80, [], list(range(80)), about))
    assert page.count("<script") == page.count("</script") == 2  # ours: the data and the code
    assert "<img" not in page
    assert "<!--" not in page.replace("<!doctype", "")
    data = page.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert json.loads(data)["texts"] == [evil] * 80


def test_command_prints_a_table_and_json(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "stove.txt"
    document.write_text(SHORT)
    options = ["inspect", str(document), "--policy", "snapkv", "--policy", "knorm", "--n-recent", "16"]
    result = run(*options, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert [p["policy"] for p in found["policies"]] == ["snapkv", "knorm"]
    assert found["document"] == "stove.txt"
    assert (found["layers"], found["kv_heads"]) == (30, 3)
    kept = -(-found["tokens"] // 2)
    assert all(p["retention"] == pytest.approx(kept / found["tokens"], abs=1e-4) for p in found["policies"])
    shown = run(*options)
    assert "knorm keeps" in shown.out
    assert shown.out.count("\n") > 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "cannot read"),
        (["DOC", "--policy", "knorm", "--policy", "knorm"], "named twice"),
        (["DOC", "--policy", "oracle"], "no policy named"),
        (["DOC", "--policy", "random", "--policy", "knorm", "--policy-options", "seed=1"], "one policy"),
        (["DOC", "-o", "DOC"], "is the document"),
        (["DOC", "-o", "nowhere/page.html"], "a folder that exists"),
        (["DOC", "--ratio", "0.9"], "smaller than"),
        (["DOC", "DOC"], "give one document"),
        (["DOC", "--question", " "], "question is empty"),
    ],
)
def test_what_is_refused(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    document = tmp_path / "stove.txt"
    document.write_text(SHORT)
    result = run("inspect", *(str(document) if a == "DOC" else a for a in arguments))
    assert result.code == 2
    assert said in result.err
    assert document.read_text() == SHORT
    assert list(tmp_path.iterdir()) == [document]


def test_twins_of_documents(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second, picture = tmp_path / "a.txt", tmp_path / "b|c.txt", tmp_path / "twins.png"
    first.write_text(SHORT)
    second.write_text(SHORT * 2)
    options = ["inspect", "--twins", str(first), str(second), "--sweep", "--plot", str(picture)]
    found = run(*options, "--json").json
    assert [d["document"] for d in found["documents"]] == ["a.txt", "b|c.txt"]
    once, twice = found["documents"]
    assert twice["share"] > once["share"]  # everything is said twice
    for d in (once, twice):
        shares = np.array(d["share_by_layer_and_head"])
        assert shares.shape == (30, 3)
        assert d["share"] == pytest.approx(shares.mean(), abs=1e-4)
        sweep = [row["share"] for row in d["sweep"]]
        assert sweep == sorted(sweep, reverse=True)
        assert len(sweep) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = run("inspect", "--twins", str(second)).out
    assert "| b\\|c.txt |" in text
    assert text.count("\n| ") == 33  # two heads, one document, 30 layers
    assert run("inspect", "--twins", str(first), "-o", "x.html").code == 2
    assert run("inspect", str(first), "--sweep").code == 2


def test_roles_in_the_cache_are_those_the_page_counts() -> None:
    script = (Path(gather.__code__.co_filename).parent / "colours.js").read_text()
    assert f"const IN_CACHE = {[int(role in IN_CACHE) for role in Role]};" in script
