"""`twinkv-edge bench` on small sizes: every sub-command runs, and what it prints holds together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli_common import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_speed(run: Run, qwen3_tiny: str) -> None:
    options = ["--model", qwen3_tiny, "--tokens", "300", "--repeats", "1", "--policy", "knorm", "--policy", "snapkv"]
    found = run("bench", "speed", *options, "--json").json
    assert [r["policy"] for r in found["rows"]] == ["knorm", "snapkv"]
    for r in found["rows"]:
        assert r["seconds"]["repair"] > 0
        assert r["share"]["repair"] == pytest.approx(r["seconds"]["repair"] / found["prefill_s"])
        assert abs(r["extra_bytes"]) < 2**30
    text = run("bench", "speed", *options).out
    assert text.count("|") > 20


def test_shapes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of a shape; lengths past what it was trained for are its length then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = ["--like", "tiny-llama", "--layers", "1", "--tokens", "2100"]
    found = run("bench", "speed", *shape, "--repeats", "1", "--policy", "h2o", "--json").json
    assert found["rows"][0]["seconds"]["score"] >= 0
    assert run("bench", "speed", "--layers", "1").code == 2
    assert run("bench", "memory", *shape, "--model", "some.gguf").code == 2
    assert "no shape" in run("bench", "memory", "--like", "gpt-5").err


def test_kernels(run: Run, tmp_path: Path) -> None:
    options = ["--size", "256", "--dim", "64", "--repeats", "1"]
    found = run("bench", "kernels", *options, "--real-keys", "200", "--json").json
    assert found["real_keys"]["mismatches"] == 0
    assert {r["operation"] for r in found["rows"]} == {"twin_counts", "best_twin", "repair", "repair by coverage"}
    assert "| twin_counts | numpy reference |" in run("bench", "kernels", *options).out


def test_needle(run: Run, licence_text: str, tmp_path: Path) -> None:
    haystack = tmp_path / "prose.txt"
    haystack.write_text(licence_text[:1200])
    options = ["--samples", "1", "--ratio", "0.4", "--policy", "knorm", "--policy", "snapkv"]
    picture = tmp_path / "needle.png"
    if importlib.util.find_spec("matplotlib"):
        options += ["--plot", str(picture)]
    found = run("bench", "needle", str(haystack), *options, "--json").json
    assert found["samples"] == 1
    assert "--plot" not in options or picture.read_bytes().startswith(b"\x89PNG")
    assert [(r["policy"], r["ratio"]) for r in found["rows"]] == [("knorm", 0.4), ("snapkv", 0.4)]
    assert all(r[c] in (0.0, 1.0) for r in found["rows"] for c in ("alone", "paper", "coverage"))


def test_memory(run: Run, qwen3_tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    options = ["--model", qwen3_tiny, "--tokens", "1400", "--more", "8", "--n-ctx", "2048", "--n-batch", "128"]
    options += ["--ratio", "0.5", "--cache-type", "f16", "--cache-type", "q8_0", "--no-limits", "--no-peers"]
    found = run("bench", "memory", *options, "--plot", str(picture), "--json").json
    assert [r["kind"] for r in found["rows"]] == 2 * ["llama.cpp"] + 4 * ["twinkv_edge"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_session(run: Run, qwen3_tiny: str, tmp_path: Path) -> None:
    options = ["--model", qwen3_tiny, "--tokens", "500", "--repeats", "2", "--prefills", "2", "--folder", str(tmp_path)]
    found = run("bench", "session", *options, "--type-k", "q8_0", "--type-v", "q8_0", "--json").json
    assert [found["n_tokens"], found["n_cells"], found["logits_max_difference"]] == [500, 250, 0.0]
    assert found["speedup"] == pytest.approx(found["prefill_median_s"] / found["load_cold_median_s"])
    assert len(found["load_warm_s"]) == len(found["prefill_s"]) == 2
    assert not list(tmp_path.iterdir())
    assert "| load, from disk |" in run("bench", "session", *options).out


def test_what_is_refused(run: Run) -> None:
    assert run("bench", "needle", "missing.txt").code == 2
    assert run("bench", "kernels", "--size", "0").code == 2
    assert run("bench", "memory", "--tokens", "9000").code == 2
    assert run("bench", "session", "--folder", "/no/such/folder").code == 2
    assert run("bench", "speed", "--policy", "oracle", "--tokens", "64").code == 2


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "memory"],
        ["bench", "kernels"],
        ["bench", "needle", "prose.txt"],
        ["bench", "needle-grid"],
        ["bench", "quality"],
        ["probe", "utility"],
        ["inspect", "--twins", "prose.txt"],
    ],
)
def test_a_picture_without_a_folder_is_refused_before_anything_is_measured(run: Run, command: list[str]) -> None:
    refused = run(*command, "--plot", "no/such/folder/x.png")
    assert refused.code == 2
    assert "cannot write no/such/folder/x.png: give a file in a folder that exists" in refused.err


def test_a_picture_that_cannot_be_written_costs_no_table(run: Run) -> None:
    pytest.importorskip("matplotlib")
    shown = run("bench", "kernels", "--size", "64", "--dim", "64", "--repeats", "1", "--plot", f"{'x' * 300}.png")
    assert shown.code == 2
    assert "| twin_counts | numpy reference |" in shown.out
    assert "file name too long" in shown.err
