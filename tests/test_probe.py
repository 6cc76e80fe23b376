"""The leave-one-out probe: ranks, samples, and the measures against plain recomputation."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from cli_common import FACT, QUESTION, SHORT, Run, runner
from conftest import logits

import twinkv_edge as tk
from twinkv_edge.bench.prose import PROSE
from twinkv_edge.probe import rank, samples, utility


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_ranks_and_rho() -> None:
    assert rank.ranks([30, 10, 20, 10]).tolist() == [4, 1.5, 3, 1.5]
    # a textbook's ten pairs (IQ and hours of television): rho = -29/165, p about 0.63
    iq = [106, 86, 100, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 0, 27, 50, 28, 29, 20, 12, 6, 17]
    rho, p = rank.spearman(iq, hours)
    assert rho == pytest.approx(-29 / 165)
    assert p == pytest.approx(0.627, abs=0.02)
    rho, p = rank.spearman(range(12), np.exp(range(12)))
    assert rho == pytest.approx(1)
    assert p < 0.001
    assert rank.spearman(iq, hours, seed=1) == rank.spearman(iq, hours, seed=1)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [([1, 2], [1, 2], "at least 3"), ([1, 1, 1], [1, 2, 3], "are equal"), ([1, 2, np.nan], [1, 2, 3], "finite")],
)
def test_what_has_no_rank_correlation(x: list[float], y: list[float], said: str) -> None:
    with pytest.raises(tk.InputError, match=said):
        rank.spearman(x, y)


def test_paragraphs_are_the_whole_text() -> None:
    text = "Heading\n\n" + SHORT + "\n \n\nA last remark.\n"
    found = samples.paragraphs(text)
    assert "".join(found).split() == text.split()
    assert found[0].startswith("Heading\n\nThe stove")
    assert len(found) == 2  # the fact is short, and goes with the bread; so does the last remark
    with pytest.raises(tk.InputError, match="one paragraph"):
        samples.about("Only this.", "Why?", "Because.")


def test_generated_samples() -> None:
    made = samples.generated(PROSE, 5)
    assert made == samples.generated(PROSE, 5) != samples.generated(PROSE, 6)
    holders = [p for p in made.paragraphs if "special magic number" in p]
    assert len(holders) == 1 + len(made.paragraphs) // 3
    assert sum(made.answer.strip() in p for p in made.paragraphs) == 1
    assert made.answer.strip() not in made.question


def test_measures_are_what_they_say(smollm2: str, open_llm) -> None:  # type: ignore[no-untyped-def]
    whole = samples.generated(PROSE, 0)
    sample = samples.ProbeSample(whole.before, whole.paragraphs[:3], whole.question, whole.answer)
    if not any(whole.answer.strip() in p for p in sample.paragraphs):
        holder = next(p for p in whole.paragraphs if whole.answer.strip() in p)
        sample = samples.ProbeSample(whole.before, (*whole.paragraphs[:2], holder), whole.question, whole.answer)
    # bit-exact caches: left-out runs can be compared with fresh ones
    kind = llama_cpp.GGML_TYPE_Q8_0
    llm = open_llm(smollm2, type_k=kind, type_v=kind)
    chunks, numbers = utility.probe(llm, sample)
    (holder,) = [c for c in chunks if c.holds_answer]
    assert holder.utility == max(c.utility for c in chunks) > 5  # seven digits it cannot guess
    assert all(c.attention > 0 for c in chunks)
    assert sum(c.attention for c in chunks) < 1  # the rest went to the sinks and the question

    def fresh(paragraphs: list[str]) -> float:
        llm.reset()
        text = sample.before, *paragraphs, sample.question
        parts = [llm.tokenize(t.encode(), add_bos=False, special=False) for t in text]
        llm.eval(sum(parts, llm.tokenize(b"", add_bos=True)))
        total = 0.0
        for token in llm.tokenize(sample.answer.encode(), add_bos=False, special=False):
            row = logits(llm).astype(np.float64)
            total += row[token] - np.logaddexp.reduce(row)
            llm.eval([token])
        return total

    full = fresh(list(sample.paragraphs))
    assert numbers["log_probability"] == pytest.approx(full, abs=0.05)
    for c in chunks:
        without = [p for i, p in enumerate(sample.paragraphs) if i != c.index]
        assert c.utility == pytest.approx(full - fresh(without), abs=0.1)


def test_command(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document, picture = tmp_path / "doc.txt", tmp_path / "probe.png"
    filler = SHORT.replace(FACT, "")
    document.write_text(f"{filler}\n\n{FACT} Nobody else is told of it, and it is not written on any other page.")
    options = ["probe", "utility", str(document), "-q", QUESTION, "-a", "5820493"]
    result = run(*options, "--plot", str(picture), "--json")
    assert result.code == 0, result.err
    found = result.json
    assert found["n"] == len(found["chunks"]) == 3
    best = max(found["chunks"], key=lambda c: c["utility"])
    assert best["holds_answer"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("probe", "utility", "-q", "Who?").code == 2
    assert run("probe", "utility", "-q", "Who?", "-a", "They.").code == 2
    assert run("probe", "utility", "--samples", "0").code == 2
