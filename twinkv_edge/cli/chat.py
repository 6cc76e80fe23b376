"""`twinkv-edge chat`"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, TwinKVError
from .documents import read_document
from .options import AnswerOptions, AsJson, CompressionOptions, ModelOptions, grouped
from .output import fail, note, print_json, progress
from .room import cells_for, check_model

if TYPE_CHECKING:
    from .chat_session import ChatSession
    from .generation import Answer

ROOM = 4096  # tokens of conversation that the default context holds besides a document


@grouped
def chat(
    *,
    doc: Annotated[
        list[str], typer.Option("--doc", help="Text, PDF or DOCX to talk about; may be repeated.", metavar="FILE")
    ] = [],  # noqa: B006 (typer)
    session: Annotated[
        Path | None, typer.Option(help="Go on with a saved conversation (compress, /save).", metavar="FILE")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; it is never evicted.", metavar="TEXT")] = None,
    json: AsJson = False,
    compression: CompressionOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> None:
    """Talk with a model; /compress evicts from its cache between turns, by the settings given here.

    On a terminal it prompts, and /help lists what it can do; from a pipe it takes every line for a message, or a
    command that begins with a slash. With --json there is one object per line.
    """
    if "-" in doc:
        raise InputError("standard input carries the conversation: give --doc a file")
    if session is not None and (doc or system):
        raise InputError("--session brings its own documents and system prompt: leave out --doc and --system")
    documents = [(Path(path).name, read_document(path)) for path in doc]
    if session is not None:
        opened, names = _reopen(session, compression, model, answer)
    else:
        opened = _open([text for _, text in documents], system, compression, model, answer)
        names = [name for name, _ in documents]
    try:
        failures = Chat(opened, documents=names, as_json=json).run()
    finally:
        opened.llm.close()
    if failures and not sys.stdin.isatty():
        raise typer.Exit(2)


def _open(
    documents: list[str],
    system: str | None,
    compression: CompressionOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> ChatSession:
    """Checks everything, loads the model, and reads the documents."""
    from .chat_session import ChatSession
    from .generation import load
    from .prompt import ChatPrompt, Vocabulary, question_about

    settings = compression.settings()
    answer.check()
    facts = check_model(model, settings.layout)
    vocabulary = Vocabulary.load(facts.path)
    prompt = ChatPrompt(vocabulary)
    messages = [{"role": "system", "content": system}] if system else []
    text = "\n\n".join(document.rstrip() for document in documents)
    first = question_about(text, "?") if documents else {"role": "user", "content": "?"}
    n_prompt = len(prompt.begin([*messages, first]))
    n_document = len(vocabulary.tokenize(text, special=False))
    n_ctx = cells_for(facts, settings, model, n_prompt, n_document, ROOM)
    llm = load(model, n_ctx, settings, seed=answer.seed)
    try:
        session = ChatSession(llm, prompt, answer, system=system)
        for document in documents:
            with progress("reading", session.count(document), "tokens") as done:
                session.add(document, done)
    except BaseException:
        llm.close()
        raise
    return session


def _reopen(
    path: Path, compression: CompressionOptions, model: ModelOptions, answer: AnswerOptions
) -> tuple[ChatSession, list[str]]:
    """Loads a saved conversation and the model it belongs to; also names of its documents."""
    from ..session import Session
    from . import saved
    from .chat_session import ChatSession
    from .prompt import ChatPrompt, Vocabulary

    answer.check()
    contents = Session.peek(path)
    saved.conversation(contents, path)
    llm = saved.open_llm(contents, path, model, answer, compression.settings(), ROOM)
    try:
        session = ChatSession(llm, ChatPrompt(Vocabulary(llm._model)), answer)
        saved.restore(session, str(path))
    except BaseException:
        llm.close()
        raise
    return session, saved.document_names(contents)


class Chat:
    """The loop around a session: reads lines, prints answers."""

    def __init__(self, session: ChatSession, *, documents: list[str], as_json: bool) -> None:
        from .chat_commands import Commands

        self.session, self.as_json = session, as_json
        self.commands = Commands(session, documents=documents, as_json=as_json)
        self.failures = 0
        self._prompts = sys.stdin.isatty() and not as_json

    def run(self) -> int:
        """Until /quit or the end of input; returns the number of lines that failed."""
        if self._prompts:
            note("/help lists the commands, Ctrl-D leaves")
        for line in self._lines():
            text = line.strip()
            if text == "/quit":
                break
            if not text:
                continue
            try:
                self.commands.run(text) if text.startswith("/") else self._turn(text)
            except TwinKVError as e:
                self.failures += 1
                fail(str(e), as_json=self.as_json)
            except KeyboardInterrupt:  # in a command that does not watch for it; nothing was left half done
                note("stopped")
        return self.failures

    def _lines(self) -> Iterator[str]:
        from .chat_commands import HELP
        from .chat_terminal import lines

        return lines({name: what for name, (_, what) in HELP.items()}) if self._prompts else self._piped_lines()

    def _piped_lines(self) -> Iterator[str]:
        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError:
                self.failures += 1
                fail(f"line {number} of the input is not UTF-8 text", as_json=self.as_json)
                continue
            yield line

    def _turn(self, text: str) -> None:
        from .chat_terminal import Printer, stoppable
        from .generation import Interrupted

        printer, said, thought = Printer(), "", ""
        with stoppable() as stopped:
            try:
                answer, pieces = self.session.ask(text, stopped=stopped)
                for piece, is_thought in self.session.visible(pieces):
                    said, thought = (said, thought + piece) if is_thought else (said + piece, thought)
                    if not self.as_json:
                        printer.write(piece, is_thought)
            except Interrupted:
                note("stopped before the answer began; the message was not sent")
                return
        if self.as_json:
            self._print_json(text, answer, said, thought)
            return
        printer.end()
        if answer.finish_reason != "stop":
            reasons = {
                "interrupted": "stopped; what was said so far stays in the conversation",
                "length": "the answer reached --max-tokens",
                "context": "the cache is full, or the length the model was trained for: /compress frees cells",
            }
            note(reasons[answer.finish_reason])

    def _print_json(self, text: str, answer: Answer, said: str, thought: str) -> None:
        print_json(
            {
                "turn": self.session.turns,
                "message": text,
                "answer": said,
                "thinking": thought or None,
                "finish_reason": answer.finish_reason,
                "answer_tokens": len(answer.tokens),
                **self.session.stats(),
            }
        )
