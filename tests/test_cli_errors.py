"""Bad input on the command line: one line, exit code 2, nothing loaded and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_common import QUESTION, SHORT, Run, runner

import twinkv_edge as tk
from twinkv_edge.cli.app import main

DOCUMENT = Path(__file__).parent.parent / "examples" / "document.txt"
QWEN3_TINY = Path(__file__).parent / "data" / "qwen3-tiny-f32.gguf"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "short.txt").write_text(SHORT, encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n\t\n")
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 64)
    return tmp_path


CASES = {
    "no such document": (["ask", "{d}/missing.txt", QUESTION], "no such file"),
    "a folder": (["ask", "{d}", QUESTION], "directory"),
    "empty": (["ask", "{d}/empty.txt", QUESTION], "empty"),
    "not UTF-8": (["ask", "{d}/latin1.txt", QUESTION], "not UTF-8 text (byte 2 is 0xfc)"),
    "empty standard input": (["ask", "-", QUESTION], "standard input is empty"),
    "no question": (["ask", "{d}/short.txt"], "give one question"),
    "two questions": (["ask", "{d}/short.txt", "a?", "-q", "b?"], "give one question"),
    "blank question": (["ask", "{d}/short.txt", "  "], "question is empty"),
    "ratio 1": (["ask", "{d}/short.txt", QUESTION, "--ratio", "1"], "ratio is 1.0"),
    "ratio below 0": (["ask", "{d}/short.txt", QUESTION, "--ratio=-0.1"], "ratio is -0.1"),
    "ratio nan": (["ask", "{d}/short.txt", QUESTION, "--ratio", "nan"], "ratio is nan"),
    "ratio no number": (["ask", "{d}/short.txt", QUESTION, "--ratio", "half"], "--ratio"),
    "unknown policy": (["ask", "{d}/short.txt", QUESTION, "--policy", "nope"], "no policy named 'nope'"),
    "policy option": (["ask", "{d}/short.txt", QUESTION, "--policy-options", "x=1"], "no option x"),
    "policy option's form": (["ask", "{d}/short.txt", QUESTION, "--policy-options", "seed"], "name=value"),
    "repair": (
        ["ask", "{d}/short.txt", QUESTION, "--repair", "glue"],
        "choose one of auto, none, paper, consistent, coverage",
    ),
    "layout": (["ask", "{d}/short.txt", QUESTION, "--layout", "row"], "choose one of head, cell"),
    "tau": (["ask", "{d}/short.txt", QUESTION, "--tau", "2"], "tau is 2.0"),
    "budget": (["ask", "{d}/short.txt", QUESTION, "--target-tokens", "20"], "smaller than the"),
    "cache type": (["ask", "{d}/short.txt", QUESTION, "--type-k", "q3_K"], "cache type 'q3_K'"),
    "threads": (["ask", "{d}/short.txt", QUESTION, "--threads", "0"], "--threads is 0"),
    "context": (["ask", "{d}/short.txt", QUESTION, "--n-ctx", "-5"], "--n-ctx is -5"),
    "max tokens": (["ask", "{d}/short.txt", QUESTION, "--max-tokens", "0"], "--max-tokens is 0"),
    "temperature": (["ask", "{d}/short.txt", QUESTION, "--temperature", "-1"], "--temperature is -1.0"),
    "top p": (["ask", "{d}/short.txt", QUESTION, "--top-p", "1.5"], "--top-p is 1.5"),
    "seed": (["ask", "{d}/short.txt", QUESTION, "--seed", "-1"], "--seed is -1"),
    "bounded without a target": (["ask", "{d}/short.txt", QUESTION, "--prefill", "bounded"], "needs target_tokens"),
    "no such model": (["ask", "{d}/short.txt", QUESTION, "--model", "{d}/none.gguf"], "none.gguf"),
    "broken model": (["ask", "{d}/short.txt", QUESTION, "--model", "{d}/broken.gguf"], "broken.gguf"),
    "model is a text": (["models", "{d}/short.txt"], "short.txt"),
    "models, context": (["models", "--n-ctx", "0"], "--n-ctx is 0"),
    "chat, no document": (["chat", "--doc", "{d}/missing.txt"], "no such file"),
    "chat, document from a pipe": (["chat", "--doc", "-"], "give --doc a file"),
    "chat, ratio": (["chat", "--ratio", "1"], "ratio is 1.0"),
    "bench, nothing to evict": (["bench", "evict", "--tokens", "100", "--target-tokens", "100"], "keep all of 100"),
    "bench, too long": (["bench", "evict", "--tokens", "9000"], "do not fit"),
    "unknown command": (["aks"], "No such command"),
    "unknown option": (["ask", "{d}/short.txt", QUESTION, "--rato", "0.5"], "--rato"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(run: Run, files: Path, case: str) -> None:
    arguments, said = CASES[case]
    arguments = [a.replace("{d}", str(files)) for a in arguments]
    plain = run(*arguments)
    assert plain.code == 2
    assert plain.out == ""
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1
    assert said in plain.err
    as_json = run(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.err == ""
    assert as_json.json == {"error": plain.err.removeprefix("error: ").rstrip("\n")}


def test_document_longer_than_the_context_says_what_would_fit(run: Run, files: Path) -> None:
    result = run("ask", str(DOCUMENT), QUESTION, "--n-ctx", "2048")
    assert result.code == 2
    n = int(result.err.split(" are ")[1].split()[0])
    assert 3300 <= n <= 3600
    assert "--n-ctx 3840" in result.err
    assert "--prefill bounded --target-tokens 1536" in result.err


def test_document_longer_than_the_model_was_trained_for(run: Run, files: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (files / "long.txt").write_text(3 * text, encoding="utf-8")
    result = run("ask", str(files / "long.txt"), QUESTION)
    assert result.code == 2
    assert "trained for 8192" in result.err
    most = int(result.err.split("at most ")[1].split()[0])
    assert 7500 < most < 8192 - 256


def test_not_enough_memory_says_what_would_fit(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkv_edge.models.footprint.free_memory", lambda: 300 << 20)
    result = run("ask", str(DOCUMENT), QUESTION, "--n-ctx", "8192")
    assert result.code == 2
    assert "300.0 are free" in result.err
    assert "--n-ctx" in result.err.split("what would fit")[1]


def test_no_embedded_model(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkv_edge.models.embedded.metadata.files", lambda package: [])
    result = run("ask", str(files / "short.txt"), QUESTION)
    assert result.code == 2
    assert "pip install 'twinkv-edge[demo]'" in result.err


def test_failure_in_the_middle_leaves_one_line(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise tk.CacheStateError("keys are\nnot finite")

    monkeypatch.setattr("twinkv_edge.pipeline.carry_out", broken)
    result = run("ask", str(files / "short.txt"), QUESTION, "--json")
    assert result.code == 2
    assert result.json == {"error": "keys are not finite"}


def test_interrupted(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("twinkv_edge.pipeline.carry_out", interrupt)
    # a job that a shell started in the background has SIGINT ignored
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = run("ask", str(files / "short.txt"), QUESTION)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result.code == 130
    assert result.err.strip() == "interrupted"


def test_errors_that_are_not_ours_are_not_hidden(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("twinkv_edge.pipeline.carry_out", bug)
    with pytest.raises(ZeroDivisionError):
        main(["ask", str(files / "short.txt"), QUESTION])


def test_reader_that_goes_away(files: Path) -> None:
    command = [sys.executable, "-m", "twinkv_edge.cli", "policies"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141
