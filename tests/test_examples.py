"""The scripts of `examples/` do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_common import QUESTION, SHORT

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(SHORT, encoding="utf-8")
    return str(path)


def run(script: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_ask(document: str) -> None:
    done = run("ask.py", document, QUESTION)
    assert "code for the north depot is 5820" in done.stdout
    words = done.stderr.split()
    n_before, n_after = int(words[0]), int(words[4])
    assert n_after == -(-7 * n_before // 10)


def test_chat() -> None:
    done = run("chat.py", "128", stdin="Hello, who are you?\nTell me about lighthouses.\nThanks. And about stoves?\n")
    told = [line.strip("[]").split() for line in done.stdout.splitlines() if line.endswith(" cells]")]
    tokens, cells = zip(*((int(words[0]), int(words[3])) for words in told), strict=True)
    assert len(tokens) == 3
    assert tokens[2] > 128 >= max(cells)


def test_session(document: str) -> None:
    assert "loaded in" in run("session.py", document, QUESTION, "0.2").stderr


@pytest.mark.slow
def test_session_of_a_long_document() -> None:
    assert "code for the north depot is 9152860" in run("session.py").stdout


def test_compare_policies(document: str) -> None:
    lines = run("compare_policies.py", document).stdout.splitlines()
    table = [[float(word) for word in line.split()[1:]] for line in lines[2:]]
    assert len(table) == 6
    assert all(row[i] == 1 for i, row in enumerate(table))
    assert all(0 < value <= 1 for row in table for value in row)


def test_llm_model(document: str) -> None:
    pytest.importorskip("llm")
    said = run("llm_model.py", document, QUESTION, "On which days is bread baked?").stdout
    assert "5820493" in said
    assert "Tuesdays and Fridays" in said
