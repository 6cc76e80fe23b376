"""`twinkv-edge chat`"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, TwinKVError
from .documents import read_document
from .options import AnswerOptions, AsJson, CompressionOptions, ModelOptions, grouped
from .output import fail, megabytes, note, print_json, progress
from .room import cells_for, check_model

if TYPE_CHECKING:
    from ..report import CompressionReport
    from .chat_session import ChatSession

ROOM = 4096  # tokens of conversation that the default context holds besides a document

HELP = """\
/compress [RATIO]  evict from the cache now; RATIO is the fraction to remove
/stats             tokens, cells and memory
/help              this
/quit              leave; so does Ctrl-D. Ctrl-C stops an answer."""


@grouped
def chat(
    *,
    doc: Annotated[str | None, typer.Option("--doc", help="Text file (UTF-8) to talk about.", metavar="FILE")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; it is never evicted.", metavar="TEXT")] = None,
    json: AsJson = False,
    compression: CompressionOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> None:
    """Talk with a model; /compress evicts from its cache between turns, by the settings given here.

    On a terminal it prompts; from a pipe it takes every line for a message, or a command that begins with a slash.
    With --json there is one object per line.
    """
    if doc == "-":
        raise InputError("standard input carries the conversation: give --doc a file")
    document = read_document(doc) if doc is not None else None
    session = _open(document, system, compression, model, answer)
    try:
        failures = Chat(session, as_json=json).run()
    finally:
        session.llm.close()
    if failures and not sys.stdin.isatty():
        raise typer.Exit(2)


def _open(
    document: str | None,
    system: str | None,
    compression: CompressionOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> ChatSession:
    """Checks everything, loads the model, and reads the document."""
    from .chat_session import ChatSession
    from .generation import load
    from .prompt import ChatPrompt, Vocabulary, question_about

    settings = compression.settings()
    answer.check()
    facts = check_model(model, settings.layout)
    vocabulary = Vocabulary.load(facts.path)
    prompt = ChatPrompt(vocabulary)
    messages = [{"role": "system", "content": system}] if system else []
    first = {"role": "user", "content": "?"} if document is None else question_about(document, "?")
    n_prompt = len(prompt.begin([*messages, first]))
    n_document = len(vocabulary.tokenize(document or "", special=False))
    n_ctx = cells_for(facts, settings, model, n_prompt, n_document, ROOM)
    llm = load(model, n_ctx, settings, seed=answer.seed)
    try:
        session = ChatSession(llm, prompt, answer, document=document, system=system)
        with progress("reading", session.n_beginning(), "tokens") as done:
            session.read_document(done)
    except BaseException:
        llm.close()
        raise
    return session


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets a flag in here, so that the cache is never left in the middle of a token; yields its getter."""
    hit = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal hit
        hit = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """The loop around a session: reads lines, prints answers."""

    def __init__(self, session: ChatSession, *, as_json: bool) -> None:
        self.session, self.as_json = session, as_json
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
                self._command(text) if text.startswith("/") else self._turn(text)
            except TwinKVError as e:
                self.failures += 1
                fail(str(e), as_json=self.as_json)
        return self.failures

    def _lines(self) -> Iterator[str]:
        if not self._prompts:
            yield from self._piped_lines()
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        while True:
            try:
                if sys.stdout.isatty():
                    yield input("> ")
                else:  # the prompt is not part of the output
                    print("> ", end="", file=sys.stderr, flush=True)
                    line = sys.stdin.readline()
                    if not line:
                        return
                    yield line
            except KeyboardInterrupt:
                print(file=sys.stderr)
            except EOFError:
                print()
                return

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
        from .generation import Interrupted

        with stoppable() as stopped:
            try:
                answer, pieces = self.session.ask(text, stopped=stopped)
                for piece in pieces:
                    if not self.as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
            except Interrupted:
                note("stopped before the answer began; the message was not sent")
                return
        if self.as_json:
            n = len(answer.tokens)
            print_json(
                {
                    "turn": self.session.turns,
                    "message": text,
                    "answer": answer.text,
                    "finish_reason": answer.finish_reason,
                    "answer_tokens": n,
                    "ms_per_token": 1e3 * answer.seconds / n if n else None,
                    **self.session.stats(),
                }
            )
            return
        print(flush=True)
        if answer.finish_reason != "stop":
            reasons = {
                "interrupted": "stopped; what was said so far stays in the conversation",
                "length": "the answer reached --max-tokens",
                "context": "the cache is full, or the length the model was trained for: /compress frees cells",
            }
            note(reasons[answer.finish_reason])

    def _command(self, text: str) -> None:
        name, *arguments = text.split()
        if name == "/compress":
            self._compress(arguments)
        elif name == "/stats" and not arguments:
            self._stats()
        elif name == "/help" and not arguments:
            print_json({"command": "help", "text": HELP}) if self.as_json else print(HELP, flush=True)
        else:
            raise InputError(f"there is no command {text!r}: /help lists them")

    def _compress(self, arguments: list[str]) -> None:
        if len(arguments) > 1:
            raise InputError("/compress takes one ratio, or nothing")
        try:
            ratio = float(arguments[0]) if arguments else None
        except ValueError:
            raise InputError(f"{arguments[0]!r} is no ratio: give a number, 0 or more and below 1") from None
        with progress("compressing", self.session.llm.kv.n_layers, "layers") as done:
            report = self.session.compress(ratio, done)
        if self.as_json:
            print_json({"command": "compress", **report.to_dict()})
        else:
            print(_compression_line(report), flush=True)

    def _stats(self) -> None:
        stats = self.session.stats()
        if self.as_json:
            print_json({"command": "stats", **stats})
            return
        print(
            f"turns: {stats['turns']}; tokens: {stats['tokens']:,}, {stats['evicted']:,} of them evicted\n"
            f"{stats['cells']:,} of {stats['cells_allocated']:,} cells in use, {megabytes(stats['bytes_used'])} MB; "
            f"{megabytes(stats['bytes_resident'])} MB of the cache in memory"
        )
        if self.session.last is not None:
            print("last compression: " + _compression_line(self.session.last))
        sys.stdout.flush()


def _compression_line(report: CompressionReport) -> str:
    repaired = f", {report.swaps:,} swaps" if report.repair != "none" else ""
    return (
        f"{report.n_before:,} -> {report.n_after:,} cells, {megabytes(report.resident_before)} -> "
        f"{megabytes(report.resident_after)} MB in memory ({report.policy}, repair {report.repair}{repaired}, "
        f"{report.total_seconds:.1f} s)"
    )
