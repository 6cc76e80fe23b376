"""Sessions from the command line: compress once, ask often; chats that are saved, loaded and taken back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cli_common import FACT, PROMPT, QUESTION, SHORT, Run, runner, say, session, spawn

import twinkv_edge as tk
from twinkv_edge.cli import saved
from twinkv_edge.cli.generation import Interrupted
from twinkv_edge.cli.options import AnswerOptions
from twinkv_edge.cli.thinking import split

KNORM = ("--policy", "knorm", "--ratio", "0.3", "--n-recent", "16", "--tau", "0.85")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(SHORT, encoding="utf-8")
    return path


def test_compress_once_and_ask_often(run: Run, document: Path, tmp_path: Path, qwen3_tiny: str) -> None:
    file = tmp_path / "doc.twinkv"
    options = (*KNORM, "--type-k", "q8_0", "--type-v", "q8_0")
    made = run("compress", str(document), "-o", str(file), *options, "--json").json
    n, report = made["session"]["tokens"], made["compression"]
    assert (report["n_before"], report["n_after"]) == (n, -(-7 * n // 10))
    assert made["session"]["cells"] == report["n_after"]
    before = file.read_bytes()
    document.unlink()  # it is not needed any more

    first = run("ask", "--session", str(file), QUESTION, "--json", "-n", "24").json
    assert "5820493" in first["answer"]
    assert first["tokens"]["loaded"] == n
    assert first["tokens"]["prefilled"] < 20  # the question and the template's end
    text = run("ask", "--session", str(file), "-q", "When is bread baked?", "--max-tokens", "24")
    assert text.code == 0
    assert text.out.strip()
    assert "none of them was read again" in text.err
    assert file.read_bytes() == before

    found = run("inspect", str(file), "--json").json
    assert found["kind"] == "session"
    assert found["documents"] == ["document.txt"]
    assert found["settings"]["ratio"] == 0.3
    assert [found["tokens"], found["cells"], found["turns"]] == [n, report["n_after"], 0]
    assert 0.6 < sum(found["compressed"]["kept_by_tenth"]) / 10 < 0.8
    assert "every head its own" in run("inspect", str(file)).out

    for arguments, reason in (
        (("ask", "--session", str(file)), "give one question"),
        (("ask", "--session", str(file), "a", "b"), "give one question"),
        (("ask", "--session", str(file), "Why?", "--model", qwen3_tiny), "another model"),
        (("ask", "--session", str(file), "Why?", "--type-k", "q4_0"), "leave it out"),
        (("ask", "--session", str(file), "Why?", "--n-ctx", "32"), "--n-ctx is 32"),
        (("chat", "--session", str(file), "--doc", str(file)), "leave out --doc"),
        (("ask",), "give a document"),
        (("inspect", str(tmp_path / "none")), "no such file"),
    ):
        refused = run(*arguments)
        assert (refused.code, reason in refused.err) == (2, True), (arguments, refused.err)
    file.write_bytes(before[:-1])
    for arguments in (("inspect", str(file)), ("ask", "--session", str(file), "Why?")):
        assert "is damaged" in run(*arguments, "--json").json["error"]


def test_the_prompt_of_a_session_is_the_prompt_of_ask(llm: Any) -> None:
    """A document read ahead, and a question behind it, are the very tokens of one prompt."""
    chat = session(llm)
    chat.add(SHORT)
    assert llm.n_tokens == len(chat.tokens)
    _, pieces = chat.ask(QUESTION)
    list(pieces)
    whole = chat.prompt.begin([{"role": "user", "content": f"{SHORT.rstrip()}\n\n{QUESTION}"}])
    assert chat.tokens[: len(whole)] == whole


def test_compress_does_not_overwrite_what_is_not_a_session(run: Run, document: Path) -> None:
    before = document.read_bytes()
    refused = run("compress", str(document), "-o", str(document))
    assert refused.code == 2
    assert "is not a session" in refused.err
    assert document.read_bytes() == before
    assert run("compress", str(document), "-o", str(document), "--force", *KNORM).code == 0
    assert tk.Session.read(document).metadata["documents"] == ["document.txt"]


@pytest.fixture
def llm(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    llm: Any = open_llm(None, n_threads_batch=2, type_k=8, type_v=8)
    llm.evaluated = []
    batch = llm._eval_batch

    def watched(tokens: list[int]) -> None:
        llm.evaluated += tokens
        batch(tokens)

    monkeypatch.setattr(llm, "_eval_batch", watched)
    return llm


def test_saved_conversation_goes_on_as_it_would_have(llm: Any, open_llm: Any, tmp_path: Path) -> None:
    chat = session(llm, system="Answer briefly.")
    chat.add(SHORT)
    say(chat, "What is the code?")
    llm.compression = tk.Compression(policy="knorm", n_recent=16, repair="none")
    chat.compress(0.3)
    chat.add("The keeper of the lighthouse is called Ada.")
    saved.save(chat, str(tmp_path / "a"), documents=[])
    expected = say(chat, "Who keeps the lighthouse?")

    other = session(open_llm(None, n_ctx=512, type_k=8, type_v=8))
    say(other, "Hello.")
    saved.restore(other, str(tmp_path / "a"))
    assert other.turns == 1
    assert other.n_protected == chat.n_protected > 5
    assert say(other, "Who keeps the lighthouse?") == expected
    assert other.messages == chat.messages
    assert other.tokens == chat.tokens


def test_documents_added_behind_a_compressed_part_are_read_once(llm: Any) -> None:
    """Where the cache cannot go back to the joint between two documents, the second is put behind it."""
    chat = session(llm)
    chat.add(SHORT)
    llm.compression = tk.Compression(policy="knorm", n_recent=16, repair="none")
    chat.compress(0.3)
    n = len(llm.evaluated)
    chat.add("The keeper of the lighthouse is called Ada.")
    chat.compress(0.1)
    say(chat, "Who keeps the lighthouse?")
    assert len(llm.evaluated) - n < 45
    pieces = b"".join(chat.prompt.vocabulary.piece(t) for t in chat.tokens).decode()
    assert f"{SHORT.rstrip()}\n\nThe keeper of the lighthouse is called Ada.\n\nWho keeps" in pieces


def test_reading_that_was_stopped_is_not_in_what_is_saved(open_llm: Any, tmp_path: Path) -> None:
    llm = open_llm(None, n_batch=32)
    chat = session(llm)
    for said in (False, True):
        if said:
            say(chat, "Hello.")
        tokens = chat.tokens
        with pytest.raises(Interrupted):
            chat.add(SHORT, stopped=lambda: True)
        assert llm.n_tokens > len(tokens)
        if said:
            assert saved.save(chat, str(tmp_path / "a"), documents=[]).tokens.tolist() == tokens[: llm.n_tokens]
        else:
            with pytest.raises(tk.CacheStateError, match="empty"):
                chat.compress()


def test_undo(llm: Any) -> None:
    chat = session(llm)
    say(chat, "Hello.")
    kept = chat.state
    first = say(chat, "What is the capital of France?")
    assert chat.undo() == "turn"
    assert chat.state == kept
    assert say(chat, "What is the capital of France?") == first
    chat.add(SHORT)
    assert chat.undo() == "document"
    llm.compression = tk.Compression(policy="knorm", n_recent=8, n_sink=2, repair="none")
    chat.compress(0.3)
    with pytest.raises(tk.CacheStateError, match="compressed as a whole"):
        chat.undo()
    before = chat.state
    say(chat, "And of Spain?")
    chat.undo()
    assert chat.state == before
    assert llm.n_tokens in (len(before.tokens), len(before.tokens) - 1)
    fresh = session(llm)
    with pytest.raises(tk.InputError, match="nothing to take back"):
        fresh.undo()


def scripted(llm: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the model say this, token by token, as generate does it."""
    script = [*llm.tokenize(text.encode(), add_bos=False, special=False), llm.token_eos()]

    def generate(tokens: list[int], **_: Any) -> Any:
        llm.eval(tokens[llm.n_tokens :])
        for token in script:
            yield token
            llm.eval([token])

    monkeypatch.setattr(llm, "generate", generate)


@pytest.mark.parametrize("compressed", [False, True])
def test_thinking_is_left_out_of_the_next_turn(llm: Any, monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    chat = session(llm, options=AnswerOptions(max_tokens=64))
    scripted(llm, "<think>\nA greeting, then.\n</think>\n\nGood morning.", monkeypatch)
    answer, pieces = chat.ask("Hello.")
    shown = list(chat.visible(pieces))
    assert "".join(p for p, thought in shown if thought) == "\nA greeting, then.\n"
    assert "".join(p for p, thought in shown if not thought) == "Good morning."
    assert chat.messages[-1]["content"] == "Good morning."
    assert "<think>" in answer.text
    if compressed:  # the thinking goes before anything is chosen
        llm.compression = tk.Compression(policy="streaming_llm", n_recent=8, n_sink=2, repair="none")
        chat.compress(0.2)
    scripted(llm, "Fine.", monkeypatch)
    say(chat, "How are you?")
    text = b"".join(chat.prompt.vocabulary.piece(t) for t in chat.tokens).decode()
    assert "greeting" not in text
    assert "Good morning." in text
    assert llm.input_ids[: llm.n_tokens].tolist() == chat.tokens[: llm.n_tokens]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_thinking_is_split_off_however_it_comes(step: int) -> None:
    def parts(text: str, **kwargs: Any) -> tuple[str, str]:
        found = list(split([text[i : i + step] for i in range(0, len(text), step)], **kwargs))
        return "".join(p for p, t in found if t), "".join(p for p, t in found if not t)

    assert parts("\n<think>a < b</think>\n\nc <think>d</think>") == ("a < b", "c <think>d</think>")
    assert parts("no tags, 1 < 2 </think>") == ("", "no tags, 1 < 2 </think>")
    assert parts("<thin air") == ("", "<thin air")
    assert parts("<think>cut </thi") == ("cut </thi", "")
    assert parts("half</think> whole", inside=True) == ("half", "whole")
    assert parts("") == ("", "")


def test_pipe_with_files(run: Run, document: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.twinkv"
    lines = [
        f"/add {document}",
        "/compress 0.3",
        QUESTION,
        f"/save {file}",
        "Thanks.",
        "/undo",
        f"/load {file}",
        "/undo",
        "/stats",
        "/add missing.txt",
        f"/save {document}",
        "/add",
        "/help me",
    ]
    options = ("--policy", "knorm", "--n-recent", "16", "--tau", "0.85", "--max-tokens", "20", "--json")
    result = run("chat", *options, stdin="\n".join(lines))
    added, compressed, answer, kept, _, undone, loaded, *rest = map(json.loads, result.out.splitlines())
    assert result.code == 2
    assert added["document"] == "document.txt"
    assert compressed["n_before"] == added["tokens"]
    assert "5820493" in answer["answer"]
    assert undone["undone"] == "turn"
    assert loaded["tokens"] == kept["tokens"]
    nothing, stats, missing, mine, lacking, too_much = rest
    assert "nothing to take back" in nothing["error"]
    assert stats["turns"] == 1
    assert stats["evicted"] > 20
    assert len(stats["kept_by_tenth"]) == 10
    assert "cannot read missing.txt" in missing["error"]
    assert "is not a session" in mine["error"]
    assert "/add needs a file" in lacking["error"]
    assert "takes nothing" in too_much["error"]
    plain = run("chat", "--session", str(file), "--max-tokens", "8", stdin="And again?\n/stats\n")
    assert plain.code == 0
    assert "turns: 2" in plain.out
    assert "kept of each tenth" in plain.out
    assert "\x1b" not in plain.out + plain.err


def test_documents(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    docx = pytest.importorskip("docx")
    pytest.importorskip("pypdf")
    from twinkv_edge.cli.documents import read_document

    made = docx.Document()
    made.add_paragraph("Before the table.")
    made.add_table(rows=1, cols=2).rows[0].cells[1].text = FACT
    made.save(str(tmp_path / "a.docx"))
    assert read_document(str(tmp_path / "a.docx")) == f"Before the table.\n\n\t{FACT}"
    pdf = tmp_path / "a.pdf"
    pdf.write_bytes(pdf_of(FACT))
    assert read_document(str(pdf)) == FACT
    for raw, why in (
        (b"%PDF-1.4 broken", "cannot be read as a PDF"),
        (pdf_of(""), "holds no text"),
        (b"PK\x03\x04 broken", "cannot be read as a DOCX"),
    ):
        pdf.write_bytes(raw)
        with pytest.raises(tk.InputError, match=why):
            read_document(str(pdf))
    monkeypatch.setitem(__import__("sys").modules, "docx", None)
    with pytest.raises(tk.InputError, match="python-docx is not installed: pip install"):
        read_document(str(tmp_path / "a.docx"))


def pdf_of(text: str) -> bytes:
    """A PDF of one page with one line."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    end = b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (table, len(out))
    return out + end


def test_terminal_from_document_to_another_day(tmp_path: Path) -> None:
    """The whole way on a real terminal: add, compress, ask about the middle, save, leave, come back, load, ask."""
    demo = Path(__file__).parent.parent / "examples" / "document.txt"
    file = tmp_path / "station.twinkv"
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    options = ["chat", "--policy", "knorm", "--ratio", "0.5", "--max-tokens", "40"]
    child = spawn(options, env=environment, dimensions=(40, 100))
    child.timeout = 400

    def at_prompt(line: str, expected: str) -> re.Match[str]:
        child.sendline(line)
        child.expect(expected)
        found: re.Match[str] = child.match
        child.expect(PROMPT)
        return found

    child.expect("Ctrl-D leaves")
    child.expect(PROMPT)
    assert int(at_prompt(f"/add {demo}", r"([\d,]+) tokens read")[1].replace(",", "")) > 3000
    compressed = at_prompt("/compress", r"([\d,]+) -> ([\d,]+) cells")
    before, after = (int(n.replace(",", "")) for n in compressed.groups())
    assert after == -(-before // 2)
    at_prompt("What is the special access code for the north depot?", "9152860")
    at_prompt(f"/save {file}", "saved")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0

    child = spawn(options, env=environment, dimensions=(40, 100))
    child.expect(PROMPT)
    at_prompt(f"/load {file}", r"1 turns, [\d,]+ tokens in [\d,]+ cells")
    at_prompt("Please repeat the special access code.", "9152860")
    at_prompt("/undo", "took the last turn back")
    at_prompt("/undo", "nothing to take back")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    history = (tmp_path / "twinkv-edge" / "history").read_text()
    assert "north depot" in history
