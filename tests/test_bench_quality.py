"""`twinkv-edge bench quality`: guesses change no answer, masks equal evictions, a killed run ends in the same table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_common import Run, runner

import twinkv_edge as tk
from twinkv_edge import pipeline, plans, tasks
from twinkv_edge.bench.quality import answers, report, tables
from twinkv_edge.bench.quality.results import Results, read
from twinkv_edge.bench.quality.sample_run import measure
from twinkv_edge.bench.quality.settings import Config, Settings, configurations
from twinkv_edge.errors import CacheStateError, InputError
from twinkv_edge.kv_cache import KVCache

pytest.importorskip("wonderwords")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


# -- the engine ----------------------------------------------------------------------------------------------------


def test_many_plans_are_what_single_ones_are(evaluated: tk.CompressedLlama) -> None:
    wanted = [
        c.compression() for c in configurations(("snapkv", "pyramidkv", "knorm"), (0.5, 0.7), layouts=("head", "cell"))
    ]
    wanted = [c for c in wanted if c.layout == "head" or (c.policy == "knorm" and c.ratio == 0.5)]
    made = plans.make_plans(evaluated.kv, wanted, 0.9)
    for cfg, plan in zip(wanted, made, strict=True):
        single = pipeline.make_plan(evaluated.kv, cfg, 0.9)
        assert (plan.retained == single.retained).all(), cfg
        assert (plan.swaps, plan.orphans, plan.donors) == (single.swaps, single.orphans, single.donors)


def test_masked_answers_are_those_of_an_evicted_cache(
    smollm2: str, licence_tokens: list[int], open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    llm = open_llm(smollm2, type_k=8, type_v=8)  # q8_0: bit-exact, whatever the order of cells
    cfg = tk.Compression(policy="knorm", ratio=0.5)
    llm.eval(licence_tokens[:300])
    plan = pipeline.make_plan(llm.kv, cfg, 0.9)
    suffix = licence_tokens[300:304]
    llm.kv.mask(plan.retained)
    earlier: list[list[int]] = []
    ends = answers.Ends(24, lambda text: False)
    masked = answers.greedy(llm, suffix, ends, earlier)
    assert llm.n_tokens == llm.kv.n_tokens == 300
    # guessing with the answer itself, with a wrong one, and not at all
    wrong = [[earlier[0][0], earlier[0][1], 5, 5, 5, 5]]
    assert answers.greedy(llm, suffix, ends, [*earlier]) == masked
    assert answers.greedy(llm, suffix, ends, wrong) == masked
    full = np.empty((16, llm.n_vocab()), np.float32)
    llm.kv.mask(None)
    likely = answers.likelihood(llm, suffix[0], licence_tokens[301:317], full, is_full=True)
    assert answers.greedy(llm, suffix, ends, []) != masked
    llm.kv.mask(plan.retained)
    with_mask = answers.likelihood(llm, suffix[0], licence_tokens[301:317], full, is_full=False)
    llm.kv.mask(None)
    llm.kv.evict(plan.retained)
    assert answers.greedy(llm, suffix, ends, []) == masked
    evicted = answers.likelihood(llm, suffix[0], licence_tokens[301:317], full, is_full=False)
    assert evicted.nll == pytest.approx(with_mask.nll, abs=1e-4)
    assert evicted.kl == pytest.approx(with_mask.kl, abs=1e-4)
    assert likely.kl == 0
    assert evicted.kl > 1e-3
    p = np.take_along_axis(full, np.array(licence_tokens[301:317])[:, None], axis=1)
    assert likely.nll == pytest.approx(-p.mean(), abs=1e-5)
    with pytest.raises(CacheStateError, match="nothing was evicted"):
        llm.kv.mask(None)


def test_where_nothing_can_be_masked_copies_are_evicted(
    smollm2: str, open_llm: Callable[..., tk.CompressedLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(smollm2, type_k=8, type_v=8)
    settings = _settings(length=400, question="after")

    def count(text: str) -> int:
        return len(llm.tokenize(text.encode(), add_bos=True, special=False))

    sample = tasks.create("niah_single_2").sample(4, tasks.Request(400, count))
    masked = measure(llm, sample, settings)
    monkeypatch.setattr(KVCache, "can_hide", False)
    evicted = measure(llm, sample, settings)
    assert evicted["outcomes"] == masked["outcomes"]
    assert masked["outcomes"][0]["text"] != masked["outcomes"][1]["text"]


def test_guesses() -> None:
    assert answers.guesses([1, 2], [[1, 2, 3, 4]]) == [3, 4]
    assert answers.guesses([1, 2], [[1, 2, 9], [1, 2, 3]]) == [3]
    assert answers.guesses([5, 1, 2], [[0, 1, 2, 7, 8]]) == [7, 8]  # what followed these two before
    assert answers.guesses([4, 5, 6, 4, 5], []) == [6, 4]  # a loop of its own
    assert answers.guesses([], []) == answers.guesses([1], []) == []


def test_loops() -> None:
    assert not answers.loops([])
    assert not answers.loops([7] * 23)
    assert answers.loops([1, 2, *[7] * 24])
    assert not answers.loops([1, 2, *[7] * 24, 8])
    assert answers.loops([3, *[5, 6, 7] * 8])
    assert not answers.loops([*[5, 6, 7] * 7, 5, 6])
    long = list(range(20))
    assert not answers.loops([*long, *long])
    assert answers.loops([99, *long, *long, *long])
    assert not answers.loops([*long, *long, *long, 50])
    counted = [token for number in range(40) for token in (number, 1000)]
    assert not answers.loops(counted)


def test_an_answer_that_loops_ends(smollm2: str, open_llm: Callable[..., tk.CompressedLlama]) -> None:
    llm = open_llm(smollm2)
    llm.eval(llm.tokenize(b"Again and again:"))
    suffix = [llm.tokenize(b" the", add_bos=False, special=False)[0]] * 40  # it goes on so
    ends = [answers.Ends(60, lambda text: False, until_loop=until) for until in (False, True)]
    free, ended = (answers.greedy(llm, suffix, each, []) for each in ends)
    assert free.startswith(ended)
    assert len(ended) < len(free)
    wrong = [[5, 5, 5]]
    assert answers.greedy(llm, suffix, ends[1], wrong) == ended


# -- tables --------------------------------------------------------------------------------------------------------


def _settings(**changes: Any) -> Settings:
    given = {"model": "m (1 bytes)", "length": 64, "seed": 0, "question": "window", "threads": 1}
    return Settings(**{**given, "configs": configurations(("knorm",), (0.5,), ("paper",)), **changes})


def _lines(task: str, *scores: tuple[float, ...]) -> list[dict[str, Any]]:
    """One line per sample: scores of the full cache, alone, repaired."""
    return [{"task": task, "index": i, "outcomes": [{"score": x} for x in s]} for i, s in enumerate(scores)]


def test_table_arithmetic() -> None:
    lines = [
        *_lines("a", *[(1.0, 0.0, 1.0)] * 6, *[(1.0, 1.0, 1.0)] * 2),
        *_lines("b", *[(1.0, 0.5, 0.5)] * 8),
        *_lines("c", *[(0.0, 1.0, 0.0)] * 8),
    ]
    result = tables.tables(_settings(), lines, min_full=0.3)
    alone, repaired = result["rows"]
    assert result["tasks"]["c"] == {"samples": 8, "full": 0.0, "counted": False}
    assert result["full"] == 1
    assert alone["value"]["mean"] == pytest.approx((0.25 + 0.5) / 2)
    assert repaired["value"]["mean"] == pytest.approx((1 + 0.5) / 2)
    assert repaired["delta"]["mean"] == pytest.approx(0.375)
    assert 0 < repaired["delta"]["low"] < 0.375 < repaired["delta"]["high"] <= 0.5
    assert (repaired["wins"], repaired["losses"], repaired["cells"]) == (1, 0, 2)
    # whatever their order; and the task that the full cache cannot do counts when it is asked for
    assert tables.tables(_settings(), lines[::-1], min_full=0.3) == result
    every = tables.tables(_settings(), lines)["rows"][1]
    assert (every["wins"], every["losses"], every["cells"]) == (1, 1, 3)
    assert "| knorm | 0.5 | 0.375 | paper | 0.750 | +0.375 [" in report.markdown(result)


def test_intervals_are_those_of_a_paired_bootstrap() -> None:
    values = np.array([0.0] * 15 + [1.0] * 5)
    found = tables.estimate([values])
    assert found.mean == 0.25
    # a mean of 20 draws with 5 in 20: standard error sqrt(.25 * .75 / 20) = 0.097
    assert found.low == pytest.approx(0.25 - 1.96 * 0.097, abs=0.04)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.097, abs=0.04)
    assert tables.Estimate(0.1, -0.1, 0.3).verdict == 0
    assert tables.Estimate(-0.2, -0.3, -0.1).verdict == -1
    few = tables.tables(_settings(), _lines("a", *[(1.0, 0.0, 1.0)] * 4))["cells"][0]
    assert few["verdict"] == 0  # four samples prove nothing


def test_likelihoods_count_the_other_way() -> None:
    lines = [
        {"task": "t", "index": i, "outcomes": [{"nll": n, "kl": k} for n, k in ((2.0, 0.0), (2.5, 0.3), (2.2, 0.1))]}
        for i in range(6)
    ]
    result = tables.tables(_settings(), lines)
    alone, repaired = result["continuation"]
    assert (result["rows"], result["full"]) == ([], None)
    assert alone["over_full"] == pytest.approx(0.5)
    assert repaired["delta"]["mean"] == repaired["worst_delta"] == pytest.approx(-0.3)
    assert (repaired["wins"], repaired["losses"]) == (1, 0)
    assert "nats" in report.markdown(result)


# -- the results file ----------------------------------------------------------------------------------------------


def test_a_torn_line_is_dropped_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(path, _settings())
    first, second = _lines("a", (1.0, 0.0, 1.0), (1.0, 1.0, 1.0))
    results.add(first)
    whole = path.read_bytes()
    results.add(second)
    path.write_bytes(path.read_bytes()[:-5])
    again = Results(path, _settings())
    assert list(again.lines) == [("a", 0)]
    assert path.read_bytes() == whole
    with pytest.raises(InputError, match=r"seed.*another --out"):
        Results(path, _settings(seed=1))
    with pytest.raises(InputError, match="configs"):
        Results(path, _settings(configs=configurations(("snapkv",), (0.5,), ("paper",))))
    path.write_bytes(whole[:20])  # not even the header was written
    assert Results(path, _settings()).lines == {}
    assert read(path)[0] == _settings()
    path.write_bytes(whole.replace(b'"index"', b'"inde'))
    with pytest.raises(InputError, match="line 2"):
        Results(path, _settings())
    path.write_text("dear diary\n")
    with pytest.raises(InputError, match="line 1"):
        Results(path, _settings())
    path.write_text("dear diary")
    with pytest.raises(InputError, match="no file of results"):
        Results(path, _settings())
    assert path.read_text() == "dear diary"


def test_configurations() -> None:
    found = configurations(("knorm", "snapkv"), (0.5, 0.7), ("none", "paper"), taus=(0.8, 0.9))
    assert found[0] == Config("none")
    assert len(found) == 1 + 2 * 2 * (1 + 2)
    assert len(set(found)) == len(found)
    for bad in ({"policies": ("oracle",)}, {"ratios": (1.5,)}, {"policies": ("none",)}, {"repairs": ("glue",)}):
        with pytest.raises(InputError):
            configurations(**bad)  # type: ignore[arg-type]


# -- the command ---------------------------------------------------------------------------------------------------

OPTIONS = ["--length", "400", "--policy", "knorm", "--ratio", "0.5", "--repair", "paper", "--continuation", "32"]
OPTIONS += ["--task", "fwe", "--task", "continue_log", "--threads", "2"]


def test_a_killed_run_goes_on_to_the_same_table(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.jsonl", tmp_path / "q.png"
    options = [*OPTIONS, "--samples", "2", "--out", str(out)]
    first = run("bench", "quality", *options, "--json", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "[4/4]" in first.err
    found = first.json["tasks"]
    assert found["continue_log"]["full_nll"] > 0
    assert {t: x["samples"] for t, x in found.items()} == {"fwe": 2, "continue_log": 2}
    data = out.read_bytes()
    lines = [json.loads(line) for line in data.splitlines()[1:]]
    assert all(len(x["outcomes"]) == 3 for x in lines)
    out.write_bytes(data[: data.index(b"\n", len(data) // 2) + 40])  # killed in the middle of a line
    again = run("bench", "quality", *options, "--json")
    assert again.json == first.json
    assert "[4/4]" not in again.err
    assert "left" not in run("bench", "quality", *options).err  # nothing to do
    refused = run("bench", "quality", *options, "--seed", "5")
    assert refused.code == 2
    assert "seed" in refused.err


def test_the_question_may_come_after_the_eviction(run: Run, tmp_path: Path) -> None:
    options = [*OPTIONS, "--samples", "1", "--out", str(tmp_path / "o.jsonl"), "--question", "after"]
    found = run("bench", "quality", *options, "--json").json
    assert found["settings"]["question"] == "after"
    assert len(found["rows"]) == 2
    assert "seen by no policy" in report.markdown(found)


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "o.jsonl")]
    assert "no task named" in run("bench", "quality", "--task", "riddles", *out).err
    assert "window or after" in run("bench", "quality", "--question", "never", *out).err
    assert run("bench", "quality", "--samples", "0", *out).code == 2
    assert run("bench", "quality", "--ratio", "1.5", *out).code == 2
    assert "--data" in run("bench", "quality", "--task", "mmlu_pro", *out).err


def test_needle_grid(run: Run, licence_text: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    haystack, picture = tmp_path / "prose.txt", tmp_path / "grid.png"
    haystack.write_text(licence_text[:900])
    options = [str(haystack), "--length", "220", "--length", "320", "--depth", "0.1", "--depth", "1", "--samples", "1"]
    options += ["--policy", "knorm", "--repair", "paper", "--plot", str(picture)]
    found = run("bench", "needle-grid", *options, "--json").json
    assert [(g["policy"], g["repair"]) for g in found["grids"]] == [
        ("none", "none"),
        ("knorm", "none"),
        ("knorm", "paper"),
    ]
    full = found["grids"][0]["accuracy"]
    assert [len(row) for row in full] == [2, 2]
    assert np.mean(full) >= 0.75
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("bench", "needle-grid", str(haystack), "--depth", "2").code == 2


@pytest.mark.slow
def test_workers_measure_the_same_and_ctrl_c_leaves_a_file_that_goes_on(run: Run, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    options = ["bench", "quality", "--task", "fwe", "--samples", "3", "--length", "400", "--policy", "knorm"]
    options += ["--ratio", "0.5", "--repair", "paper", "--threads", "1"]
    expected = run(*options, "--out", str(alone), "--json").json
    options += ["--out", str(shared), "--workers", "2"]
    command = [sys.executable, "-m", "twinkv_edge.cli", *options]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # a job that a shell started in the background has SIGINT ignored, and its children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if "[1/3]" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(60) == 130, rest
    assert "Traceback" not in rest
    assert 1 <= len(read(shared)[1]) < 3
    again = run(*options, "--json").json
    assert again == expected


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    options = ["bench", "quality", "--task", "fwe", "--samples", "50", "--length", "400", "--policy", "knorm"]
    options += ["--workers", "2", "--out", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "twinkv_edge.cli", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr
        assert any("[1/50]" in line for line in process.stderr)
        process.kill()
        process.communicate(timeout=30)  # to the end of what the workers inherited: until they are gone
