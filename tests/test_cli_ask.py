"""`twinkv-edge ask` on the embedded model and a short document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_common import QUESTION, SHORT, Run, runner

import twinkv_edge as tk
from twinkv_edge.cli.generation import Answer, prefill, stream
from twinkv_edge.cli.options import AnswerOptions
from twinkv_edge.cli.prompt import ChatPrompt, Vocabulary, question_about, tail_length

STREAMING = ("--policy", "streaming_llm", "--repair", "none", "--ratio", "0.6", "--n-recent", "30")
KNORM = ("--policy", "knorm", "--ratio", "0.3", "--n-recent", "32")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(SHORT, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def prompt(smollm2: str) -> ChatPrompt:
    return ChatPrompt(Vocabulary.load(Path(smollm2)))


def test_the_answer_alone_goes_to_stdout(run: Run, document: str) -> None:
    result = run("ask", document, QUESTION, *KNORM, "--repair", "paper", "--tau", "0.85")
    assert result.code == 0
    assert "5820493" in result.out
    assert "\x1b" not in result.out + result.err  # no escape codes without a terminal
    for said in ("cells per head", "cache in memory, MB", "decode, ms/token", "tau 0.85 (given)", "knorm", "native"):
        assert said in result.err
        assert said not in result.out


def test_json_says_everything(run: Run, document: str) -> None:
    result = run("ask", document, QUESTION, *KNORM, "--json", "--max-tokens", "24")
    found = result.json
    assert result.code == 0
    assert result.err == ""
    assert "5820493" in found["answer"]
    report, cache = found["compression"], found["cache"]
    n = found["tokens"]["prompt"] - 1  # the last one is decoded with the answer
    assert (report["n_before"], report["n_after"], report["n_tokens"]) == (n, -(-7 * n // 10), n)
    assert cache["before"]["cells"] == n
    assert cache["after"]["cells"] == report["n_after"]
    assert cache["after"]["bytes_resident"] < cache["before"]["bytes_resident"]
    assert found["tau"] == {"value": 0.9, "origin": "model default", "has_qk_norm": False}
    assert found["settings"]["policy"] == "knorm"
    assert found["settings"]["n_recent"] == 32
    assert all(0 < n <= 16 for n in found["decode_ms"]["timed_tokens"])  # fewer where decoding is slow
    assert found["decode_ms"]["before"] > 0
    assert set(found["seconds"]) == {"load", "prefill", "compress", "answer"}
    assert set(report["seconds"]) >= {"score", "repair", "evict", "release"}
    assert found["full_cache_answer"] is None


@pytest.mark.parametrize("policy", tk.policies.names())
def test_every_policy_with_every_repair(
    policy: str, run: Run, document: str, tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["--model", tiny("tiny-llama")]
    facts = tk.models.facts(model[1])
    options = [*model, "--policy", policy, "--n-recent", "30", "--tau", "0.3", "--max-tokens", "2", "--json"]
    if policy == "duo_attention":
        pattern = tmp_path / "pattern.tsv"
        np.savetxt(pattern, np.random.default_rng(0).random((facts.n_layer, facts.n_head_kv)), delimiter="\t")
        options += ["--policy-options", f"pattern={pattern}"]
    if policy == "qfilters":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "text.txt").write_text(SHORT * 4, encoding="utf-8")
        run("calibrate", str(tmp_path / "text.txt"), *model)
    kept = set()
    for repair in ("none", "paper", "consistent", "coverage"):
        result = run("ask", document, QUESTION, *options, "--repair", repair)
        assert result.code == 0, result.out
        done = result.json["compression"]
        assert (done["policy"], done["repair"]) == (policy, repair)
        assert (done["swaps"] > 0) == (repair != "none" and policy != "none")
        kept.add((done["n_after"], done["bytes_after"]))
    assert len(kept) == 1  # the repair leaves the budget alone


def test_compare_answers_twice(run: Run, document: str) -> None:
    result = run("ask", document, QUESTION, "--compare", *STREAMING, "--max-tokens", "32")
    full, compressed = result.out.split("\ncompressed:")
    assert full.startswith("full cache:")
    assert "5820493" in full
    assert "5820493" not in compressed  # the sinks and the last tokens do not hold the fact


def test_standard_input_and_the_question_as_an_option(run: Run) -> None:
    result = run("ask", "-", "-q", QUESTION, "--policy", "none", "--json", stdin="\ufeff" + SHORT)
    assert "5820493" in result.json["answer"]
    assert result.json["cache"]["after"]["cells"] == result.json["cache"]["before"]["cells"]


def test_recent_window_grows_to_cover_a_long_question(run: Run, document: str, prompt: ChatPrompt) -> None:
    question = "I have read all of this twice and I still wonder about one thing: " + QUESTION
    found = run("ask", document, question, "--policy", "knorm", "--ratio", "0.2", "--n-recent", "8", "--json").json
    tail = tail_length(prompt, SHORT, prompt.begin([question_about(SHORT, question)]))
    assert tail > 20
    assert found["settings"]["n_recent"] == tail
    assert any(f"from 8 to {tail}" in remark for remark in found["notes"])


def test_bounded_prefill_never_holds_the_document(run: Run, document: str) -> None:
    options = ("--prefill", "bounded", "--target-tokens", "112", "--n-batch", "32", "--n-recent", "40")
    result = run(
        "ask", document, QUESTION, "--policy", "knorm", *options, "--n-ctx", "256", "--json", "--max-tokens", "8"
    )
    found = result.json
    assert found["compression"]["n_tokens"] > 112 + 32
    assert found["cache"]["peak_cells"] <= 112 + 32
    assert found["cache"]["after"]["cells"] == 112


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "expected_attention"])
def test_clock_and_comparison_leave_no_trace(
    run: Run, document: str, open_llm: Any, prompt: ChatPrompt, policy: str
) -> None:
    """The tokens decoded on the full cache are taken back: the answer is that of a session that never decoded them,
    also with policies that score by what was captured of the queries."""
    options = ("--policy", policy, "--ratio", "0.5", "--n-recent", "40", "--type-k", "q8_0", "--type-v", "q8_0")
    result = run("ask", document, QUESTION, *options, "--threads", "1", "--max-tokens", "12", "--json", "--compare")
    assert result.err == ""
    found = result.json
    tokens = prompt.begin([question_about(SHORT, QUESTION)])
    cfg = tk.Compression(policy=policy, n_recent=40)
    llm = open_llm(None, n_threads=1, n_threads_batch=1, type_k=8, type_v=8, n_ctx=512, compression=cfg)
    prefill(llm, tokens)
    report = llm.compress()
    assert found["compression"]["swaps"] == report.swaps
    answer = Answer()
    text = "".join(stream(llm, prompt.vocabulary, tokens, AnswerOptions(max_tokens=12), answer))
    assert found["answer"] == text == answer.text


def test_prompt_is_the_one_of_create_chat_completion(open_llm: Any, prompt: ChatPrompt) -> None:
    llm: tk.CompressedLlama = open_llm(None)
    messages: list[dict[str, str]] = [question_about(SHORT, QUESTION)]
    tokens = prompt.begin(messages)
    llm.create_chat_completion(messages=messages, max_tokens=1, temperature=0.0)  # type: ignore[arg-type]
    assert llm.input_ids[: len(tokens)].tolist() == tokens


def test_control_tokens_in_a_document_stay_text(prompt: ChatPrompt) -> None:
    text = "In this format <|im_end|> ends a message and <|im_start|>user begins one."
    tokens = prompt.begin([{"role": "user", "content": text}])
    control = [t for t in tokens if prompt.vocabulary.is_control(t)]
    plain = prompt.begin([{"role": "user", "content": "x"}])
    assert control == [t for t in plain if prompt.vocabulary.is_control(t)]
    pieces = b"".join(map(prompt.vocabulary.piece, tokens)).decode()
    assert text in pieces


def test_tail_is_what_follows_the_document(prompt: ChatPrompt) -> None:
    tokens = prompt.begin([question_about(SHORT, QUESTION)])
    tail = tail_length(prompt, SHORT, tokens)
    text = b"".join(map(prompt.vocabulary.piece, tokens[-tail:])).decode()
    assert text.strip().startswith(QUESTION)
    assert "mood" not in text


def test_seed_decides_sampling(run: Run) -> None:
    hot = (
        "ask",
        "-",
        "Tell a story.",
        "--policy",
        "none",
        "--temperature",
        "1.5",
        "--max-tokens",
        "8",
        "--threads",
        "1",
    )
    first, again, other = (run(*hot, "--json", "--seed", s, stdin="Once.").json["answer"] for s in ("7", "7", "8"))
    assert first == again
    assert first != other
