"""What the tests of the command line share: a short document, and running commands in this process."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pexpect
import pytest

import twinkv_edge as tk
from twinkv_edge.cli.app import main
from twinkv_edge.cli.chat_session import ChatSession
from twinkv_edge.cli.options import AnswerOptions
from twinkv_edge.cli.prompt import ChatPrompt, Vocabulary

FACT = "The special access code for the north depot is 5820493."
QUESTION = "What is the special access code for the north depot?"
SHORT = f"""The stove burns wood and it must never be left with its lower door open during the night. Ashes go into the
iron bucket, the bucket goes out onto the stone step, and it stays there until the next morning.

{FACT}

Bread is baked on Tuesdays and Fridays. The starter lives in the stone jar on the second shelf, and it must be fed with
flour and water every second day, also at Christmas, also during storms, and also when everyone is in a bad mood.
"""


PROMPT = r"\x1b\[\?2004h"  # prompt_toolkit is ready for a line; how it draws the prompt depends on what was there
BRIEF = AnswerOptions(max_tokens=8)


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON object on one line."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


Run = Callable[..., Result]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command as the console script does; `stdin`: what it reads from a pipe."""

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def session(llm: tk.CompressedLlama, **kwargs: Any) -> ChatSession:
    return ChatSession(llm, ChatPrompt(Vocabulary(llm._model)), kwargs.pop("options", BRIEF), **kwargs)


def say(chat: ChatSession, text: str) -> str:
    answer, pieces = chat.ask(text)
    assert "".join(pieces) == answer.text
    return answer.text


def heed_interrupts() -> None:
    """A job that a shell started in the background has SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spawn(arguments: list[str], **kwargs: Any) -> Any:
    """The command on a terminal of its own."""
    command = ["-m", "twinkv_edge.cli", *arguments]
    return pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=120, preexec_fn=heed_interrupts, **kwargs)
