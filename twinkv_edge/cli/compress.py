"""`twinkv-edge compress`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .documents import read_document
from .options import AnswerOptions, AsJson, CompressionOptions, ModelOptions, grouped
from .output import megabytes, note, print_json, progress, share, stderr_console, table
from .room import cells_for, check_model

if TYPE_CHECKING:
    from ..session import Session


@grouped
def compress(
    *,
    document: Annotated[str, typer.Argument(help='Text, PDF or DOCX, or "-" for standard input.', metavar="DOC|-")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The session file to write.", metavar="FILE")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a session, too.")] = False,
    json: AsJson = False,
    compression: CompressionOptions,
    model: ModelOptions,
) -> None:
    """Read a document once, compress its cache, and save it: `ask --session FILE` answers from it afterwards.

    The choice of what to keep is made before any question is known, and the question is read after the eviction. So
    the answers to all questions come from the same cells; `ask DOC QUESTION`, which chooses with the question in view,
    may keep what one question needs better. The file holds the text and is readable only by you.
    """
    from ..session.session import check_target

    check_target(output, force=force)
    text = read_document(document)
    result, session = _run(text, document, output, compression, model, force=force)
    if json:
        print_json(result)
    else:
        _show(result, session)


def _run(
    text: str, name: str, output: Path, compression: CompressionOptions, model: ModelOptions, *, force: bool
) -> tuple[dict[str, Any], Session]:
    from . import saved
    from .chat_session import ChatSession
    from .generation import load
    from .prompt import ChatPrompt, Vocabulary, question_about

    settings = compression.settings()
    facts = check_model(model, settings.layout)
    vocabulary = Vocabulary.load(facts.path)
    prompt = ChatPrompt(vocabulary)
    n_prompt = len(prompt.begin([question_about(text, "?")]))
    n_document = len(vocabulary.tokenize(text, special=False))
    n_ctx = cells_for(facts, settings, model, n_prompt, n_document, 1)
    settings.budget(n_document)  # raises when it is too small
    began = time.perf_counter()
    llm = load(model, n_ctx, settings)
    seconds = {"load": time.perf_counter() - began}
    try:
        chat = ChatSession(llm, prompt, AnswerOptions())
        with progress("reading", n_prompt, "tokens") as done:
            began = time.perf_counter()
            chat.add(text, done)
            seconds["prefill"] = time.perf_counter() - began
        before = llm.footprint()
        with progress("choosing", llm.kv.n_layers, "layers") as done:
            began = time.perf_counter()
            report = chat.compress(progress=done)
            seconds["compress"] = time.perf_counter() - began
        began = time.perf_counter()
        session = saved.save(chat, str(output), documents=[Path(name).name if name != "-" else "-"], force=force)
        seconds["save"] = time.perf_counter() - began
        after = llm.footprint()
    finally:
        llm.close()
    notes = [] if prompt.has_template else ["the model has no chat template: it gets the plain text"]
    result = {
        "session": saved.facts_of(session),
        "compression": report.to_dict(),
        "cache": {"n_ctx": n_ctx, "before": before.to_dict(), "after": after.to_dict()},
        "seconds": seconds,
        "notes": notes,
    }
    return result, session


def _show(result: dict[str, Any], session: Session) -> None:
    before, after, seconds = result["cache"]["before"], result["cache"]["after"], result["seconds"]
    rows = [("cells per head", f"{before['cells']:,}", f"{after['cells']:,}", share(after["cells"], before["cells"]))]
    for name, key in (("cache in use, MB", "bytes_used"), ("cache in memory, MB", "bytes_resident")):
        rows.append((name, megabytes(before[key]), megabytes(after[key]), share(after[key], before[key])))
    for remark in result["notes"]:
        note(remark)
    console = stderr_console()
    console.print(table(("", "before", "after", ""), rows))
    console.print(
        "seconds: "
        + ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
        + f"; {megabytes(session.n_bytes)} MB "
        "on disk",
        soft_wrap=True,
    )
    print(session.path)
