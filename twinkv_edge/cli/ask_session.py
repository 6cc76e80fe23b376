"""`twinkv-edge ask --session`: a question to a saved, compressed cache; nothing of the document is read again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..session import Session
from . import saved
from .options import AnswerOptions, ModelOptions
from .output import megabytes, note, print_json, stderr_console

ROOM_FOR_A_QUESTION = 512  # cells; more where the question needs them


def ask_session(path: Path, question: str, model: ModelOptions, answer: AnswerOptions, *, as_json: bool) -> None:
    """Answers, and leaves the file as it is.

    Raises:
        InputError, SessionError: The question is empty, or the session does not fit this model.
    """
    answer.check()
    contents = Session.peek(path)
    saved.conversation(contents, path)
    result = _run(path, question, model, answer, quiet=as_json)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _run(path: Path, question: str, model: ModelOptions, options: AnswerOptions, *, quiet: bool) -> dict[str, Any]:
    from .chat_session import ChatSession
    from .prompt import ChatPrompt, Vocabulary

    contents = Session.peek(path)
    room = options.max_tokens + max(ROOM_FOR_A_QUESTION, 2 * len(question))
    began = time.perf_counter()
    llm = saved.open_llm(contents, path, model, options, contents.compression, room)
    seconds = {"load": time.perf_counter() - began}
    try:
        chat = ChatSession(llm, ChatPrompt(Vocabulary(llm._model)), options)
        began = time.perf_counter()
        session = saved.restore(chat, str(path))
        seconds["session"] = time.perf_counter() - began
        n_before, footprint = llm.n_tokens, llm.footprint()
        answer, pieces = chat.ask(question)
        text = chat.visible(pieces)
        shown = ""
        for piece, is_thought in text:
            if is_thought:
                continue
            shown += piece
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if not quiet:
            print(flush=True)
        seconds["answer"] = answer.seconds
    finally:
        llm.close()
    return {
        "answer": shown,
        "finish_reason": answer.finish_reason,
        "question": question,
        "session": saved.facts_of(session),
        "tokens": {"loaded": n_before, "prefilled": chat.n_read, "answer": len(answer.tokens)},
        "cache": footprint.to_dict(),
        "decode_ms": 1e3 * answer.seconds / len(answer.tokens) if answer.tokens else None,
        "seconds": seconds,
    }


def _show(result: dict[str, Any]) -> None:
    session, seconds, cache = result["session"], result["seconds"], result["cache"]
    console = stderr_console()
    console.print(
        f"\n{session['path']}: {session['tokens']:,} tokens in {session['cells']:,} cells, "
        f"{megabytes(cache['bytes_resident'])} MB in memory; none of them was read again",
        soft_wrap=True,
    )
    console.print("seconds: " + ", ".join(f"{name} {s:.2f}" for name, s in seconds.items()), soft_wrap=True)
    if result["finish_reason"] in ("length", "context"):
        end = {"length": "at --max-tokens", "context": "because the cache, or the trained length, was full"}
        note(f"the answer stopped {end[result['finish_reason']]}")
