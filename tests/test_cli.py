"""The command line as a whole: help, version, options, `models`, `policies`, `bench evict`, and the demo document."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cli_common import QUESTION, Run, runner

import twinkv_edge as tk
from twinkv_edge.cli.options import CompressionOptions
from twinkv_edge.cli.prompt import Vocabulary

DOCUMENT = Path(__file__).parent.parent / "examples" / "document.txt"
CODE = "9152860"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from twinkv_edge.cli.app import main; main(['ask', '--help']); "
        "print({'llama_cpp', 'numba', 'gguf', 'twinkv_edge._native'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    assert "--policy" in done.stdout


def test_lazy_names_of_the_package_are_the_real_ones() -> None:
    code = (
        "import twinkv_edge.repair, twinkv_edge as tk; from twinkv_edge import *; "
        "assert all(hasattr(tk, name) for name in tk.__all__); "
        "assert CompressedLlama is tk.CompressedLlama and callable(tk.repair)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tk.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_version(run: Run) -> None:
    assert run("--version").out == f"twinkv-edge {tk.__version__}\n"


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_without_a_command_help_is_shown(run: Run, command: list[str]) -> None:
    result = run(*command)
    assert result.code == 2
    assert "Usage: twinkv-edge" in result.out
    assert "error" not in result.err


def test_options_are_the_fields_of_compression() -> None:
    def defaults(cls: type) -> dict[str, object]:
        fields = dataclasses.fields(cls)
        return {f.name: f.default for f in fields if f.name != "policy_options"}

    assert defaults(CompressionOptions) == defaults(tk.Compression)
    assert CompressionOptions().settings() == tk.Compression()
    made = CompressionOptions(policy="random", policy_options=["seed=3"]).settings()
    assert made.policy_options == {"seed": 3}


def test_models_describes_the_embedded_one(run: Run) -> None:
    found = run("models", "--json", "--n-ctx", "4096").json
    assert found["embedded"]
    assert found["supported"]
    assert found["model"]["n_layer"] == 30
    assert {row["n_cells"] for row in found["estimates"]} == {4096}
    shown = run("models")
    assert "8192 tokens" in shown.out
    assert "0.90" in shown.out


def test_models_describes_a_file(run: Run, qwen3_tiny: str) -> None:
    found = run("models", qwen3_tiny, "--json").json
    assert not found["embedded"]
    assert found["model"]["has_qk_norm"]
    assert found["model"]["default_tau"] == 0.85


def test_policies_marks_third_party_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shortest(tk.policies.Policy):
        name = "shortest"
        summary = "a policy of somebody else"

        def score(self, layer: tk.policies.LayerView) -> npt.NDArray[np.float32]:
            return np.zeros(layer.positions.shape, dtype=np.float32)

    monkeypatch.setattr(tk.policies, "_registered", dict(tk.policies._registered))
    tk.policies.register(Shortest)
    rows = {row["name"]: row for row in run("policies", "--json").json["policies"]}
    assert list(rows) == tk.policies.names()
    assert [name for name, row in rows.items() if row["third_party"]] == ["shortest"]
    assert all(row["summary"] for row in rows.values())
    (line,) = [line for line in run("policies").out.splitlines() if line.startswith("shortest")]
    assert "third party" in line


def test_bench_evict_measures_what_it_says(run: Run) -> None:
    sizes = ("--tokens", "512", "--target-tokens", "128", "--n-ctx", "768")
    found = run("bench", "evict", *sizes, "--timed", "16", "--json").json
    assert (found["n_before"], found["n_after"]) == (512, 128)
    assert found["bytes_evicted"] == 384 * 30 * 2 * 3 * 64 * 2  # cells, layers, K and V, heads, head size, f16
    # tokens that were decoded for the clock and taken back leave pages too: 17 cells and page ends beside 384
    assert 0.9 <= found["cache_returned"] <= 1.1
    assert len(found["decode_ms_before"]) == len(found["decode_ms_after"]) == 16
    assert found["speedup"] == found["decode_ms_median_before"] / found["decode_ms_median_after"]
    assert found["process_before"] > found["cache_before"]
    assert (found["policy"], found["repair"]) == ("knorm", "coverage")


def test_bench_evict_shows_a_table(run: Run) -> None:
    result = run("bench", "evict", "--tokens", "256", "--target-tokens", "128", "--n-ctx", "512", "--timed", "4")
    assert result.code == 0
    for said in ("cache in memory, MB", "process in memory, MB", "decode, ms/token", "came back", "f16/f16"):
        assert said in result.out


def test_demo_document_is_long_and_holds_the_fact_once(smollm2: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    tokens = Vocabulary.load(Path(smollm2)).tokenize(text, special=False)
    assert len(tokens) >= 3300
    assert text.count(CODE) == 1
    assert 0.4 < text.index(CODE) / len(text) < 0.6


@pytest.mark.slow
def test_demo_holds_the_fact_at_half_the_cache(run: Run) -> None:
    found = run("ask", str(DOCUMENT), QUESTION, "--policy", "knorm", "--ratio", "0.5", "--compare", "--json").json
    assert CODE in found["full_cache_answer"]
    assert CODE in found["answer"]
    assert found["cache"]["after"]["cells"] <= -(-found["cache"]["before"]["cells"] // 2)
