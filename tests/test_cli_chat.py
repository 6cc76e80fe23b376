"""`twinkv-edge chat`: the session, pipes, JSON, and a real terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cli_common import BRIEF, PROMPT, SHORT, Run, runner, say, session, spawn

import twinkv_edge as tk
from twinkv_edge.cli.generation import Interrupted
from twinkv_edge.cli.options import AnswerOptions

ESCAPES = "\x1b"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(SHORT, encoding="utf-8")
    return str(path)


@pytest.fixture
def llm(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> tk.CompressedLlama:
    """With `llm.evaluated`, the tokens that were decoded so far, in order."""
    llm: Any = open_llm(None, n_threads_batch=2)
    llm.evaluated = []
    batch = llm._eval_batch

    def watched(tokens: list[int]) -> None:
        llm.evaluated += tokens
        batch(tokens)

    monkeypatch.setattr(llm, "_eval_batch", watched)
    return llm


def test_nothing_is_evaluated_twice(llm: Any) -> None:
    chat = session(llm, system="Answer briefly.")
    chat.add(SHORT)
    assert len(llm.evaluated) > 80
    say(chat, "What is the code?")
    chat.compress(0.3)
    say(chat, "And when is bread baked?")
    say(chat, "Thank you.")
    assert len(llm.evaluated) <= len(chat.tokens)
    assert llm.evaluated == chat.tokens[: len(llm.evaluated)]
    assert len(chat.tokens) - len(llm.evaluated) <= 1  # the last token of the last answer
    assert llm.kv.n_cells < llm.kv.n_tokens


def test_history_is_the_template_around_what_was_said(llm: Any) -> None:
    chat = session(llm)
    say(chat, "Hello.")
    say(chat, "Who are you?")
    vocabulary = chat.prompt.vocabulary
    ours = b"".join(vocabulary.piece(t) or vocabulary.text(t).encode() for t in chat.tokens).decode()
    theirs = chat.prompt._render(chat.messages[:-1]) + chat.messages[-1]["content"]
    assert ours.rstrip() == theirs.rstrip()


def test_stopped_answer_stays_in_the_conversation(llm: Any) -> None:
    chat = session(llm, options=AnswerOptions(max_tokens=64))
    taken: list[str] = []
    answer, pieces = chat.ask("Count from one to one hundred.", stopped=lambda: len(taken) >= 3)
    for piece in pieces:
        taken.append(piece)
    assert answer.finish_reason == "interrupted"
    assert 3 <= len(answer.tokens) <= 4
    assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
    before = len(llm.evaluated)
    say(chat, "Go on.")
    assert llm.evaluated == chat.tokens[: len(llm.evaluated)]
    assert len(llm.evaluated) - before < 40


def test_stopped_reading_leaves_the_conversation_as_it_was(open_llm: Any) -> None:
    llm = open_llm(None, n_batch=32)
    chat = session(llm)
    say(chat, "Hello.")
    before = (list(chat.tokens), list(chat.messages), chat.turns)
    with pytest.raises(Interrupted):
        list(chat.ask("A long message. " * 40, stopped=lambda: True)[1])
    assert (chat.tokens, chat.messages, chat.turns) == before
    fresh = session(open_llm(None, n_batch=32))
    say(fresh, "Hello.")
    assert say(chat, "Who are you?") == say(fresh, "Who are you?")


def test_message_that_does_not_fit_changes_nothing(open_llm: Any) -> None:
    llm = open_llm(None, n_ctx=256)
    chat = session(llm)
    say(chat, "Hello.")
    before = (list(chat.tokens), llm.n_tokens)
    with pytest.raises(tk.CacheStateError, match="do not fit"):
        list(chat.ask("too long " * 300)[1])
    assert (chat.tokens, llm.n_tokens) == before
    assert say(chat, "Who are you?")


def test_full_cache_ends_the_answer_and_compression_goes_on(open_llm: Any) -> None:
    llm = open_llm(None, n_ctx=256)
    chat = session(llm, options=AnswerOptions(max_tokens=1000, repeat_penalty=1.3))
    answer, pieces = chat.ask("Write a very long story about a lighthouse, and never end it.")
    list(pieces)
    assert answer.finish_reason == "context"
    assert llm.kv.n_cells == llm.kv.n_cells_allocated
    chat.compress(0.6)
    chat.options = BRIEF
    assert say(chat, "Who is in the story?")


def test_system_prompt_is_never_evicted(llm: Any) -> None:
    chat = session(llm, system="You are the keeper of a lighthouse, and you answer in few words.")
    say(chat, "Hello. " * 30)
    assert chat.n_protected > 15
    llm.compression = tk.Compression(policy="random", n_sink=0, n_recent=8)
    chat.compress(0.5)
    kept = llm.kv.positions(0)
    for head in range(llm.kv.n_head_kv):
        assert set(range(chat.n_protected)) <= set(kept[:, head].tolist())


def test_pipe(run: Run, document: str) -> None:
    lines = "What is the code?\n\n/compress 0.3\n/stats\n/help\nWhen is bread baked?\n/quit\nnever read\n"
    options = ("--doc", document, "--policy", "knorm", "--repair", "none", "--max-tokens", "24", "--n-recent", "16")
    result = run("chat", *options, stdin=lines)
    assert result.code == 0
    assert ESCAPES not in result.out + result.err
    assert "> " not in result.out.replace("-> ", "")
    assert "5820493" in result.out
    assert "turns: 1; tokens: " in result.out
    assert "last compression: " in result.out
    assert "/compress [RATIO]" in result.out
    assert "never" not in result.out


def test_json_is_one_object_per_line(run: Run, document: str) -> None:
    lines = "What is the code?\n/compress 0.4\n/stats\n/compress 7\n/nonsense\n/help\nThanks.\n"
    options = ("--doc", document, "--policy", "keydiff", "--max-tokens", "16", "--n-recent", "16", "--json")
    result = run("chat", *options, stdin=lines)
    first, compressed, stats, ratio, unknown, told, last = map(json.loads, result.out.splitlines())
    assert result.code == 2  # two lines failed
    assert first["turn"] == 1
    assert first["answer"]
    assert first["ms_per_token"] > 0
    assert compressed["n_after"] == stats["cells"] < compressed["n_before"]
    assert stats["last_compression"]["n_after"] == compressed["n_after"]
    assert "ratio is 7.0" in ratio["error"]
    assert "/nonsense" in unknown["error"]
    assert "/quit" in told["text"]
    assert last["turn"] == 2
    assert last["evicted"] == compressed["n_before"] - compressed["n_after"]


def test_line_that_is_not_utf8_is_skipped(run: Run) -> None:
    result = run("chat", "--json", "--max-tokens", "4", stdin=b"gr\xfc\xdfe\nHello.\n")
    error, answer = map(json.loads, result.out.splitlines())
    assert error == {"error": "line 1 of the input is not UTF-8 text"}
    assert answer["turn"] == 1
    assert result.code == 2


@pytest.fixture
def terminal(document: str, tmp_path: Path) -> Iterator[Any]:
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    options = ["--doc", document, "--policy", "knorm", "--max-tokens", "2000", "--repeat-penalty", "1.3"]
    child = spawn(["chat", *options], env=environment, dimensions=(24, 40))  # narrow, too
    yield child
    child.close(force=True)


def test_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(terminal: Any) -> None:
    terminal.expect("Ctrl-D leaves")
    terminal.expect(PROMPT)
    terminal.sendline("Write a very long story about a lighthouse.")
    terminal.expect(r"\x1b\[\?2004l")  # the line was taken
    terminal.expect(r"[a-z]{3,} [a-z]+ [a-z]+")  # it has begun to answer
    terminal.sendintr()
    terminal.expect("stopped; what was said so far stays")
    terminal.expect(PROMPT)
    terminal.sendintr()  # at the prompt: a new line, and nothing else
    terminal.expect(PROMPT)
    terminal.sendline("/stats")
    terminal.expect(r"turns: 1; tokens: (\d+)")
    assert 150 < int(terminal.match[1]) < 2000
    terminal.expect(PROMPT)
    terminal.sendline("/compress 0.4")
    terminal.expect(r"(\d+) -> (\d+) cells")
    terminal.expect(PROMPT)
    terminal.sendline("/quit now")
    terminal.expect("error: there is no command")
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_terminal_ctrl_c_in_ask_leaves() -> None:
    demo = Path(__file__).parent.parent / "examples" / "document.txt"
    child = spawn(["ask", str(demo), "Where are the matches?"])
    child.expect("reading")  # the progress bar
    child.sendintr()
    child.expect("interrupted")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
