"""The terminal of a chat: lines that come in, with history and completion, and pieces of answers that go out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
PROMPT = "> "


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


def colours() -> bool:
    """Whether standard output takes escape codes: a terminal, and nobody said no (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Printer:
    """Writes an answer piece by piece: thinking dimmed on a terminal, and not at all into a pipe."""

    def __init__(self) -> None:
        self._colours = colours()
        self._terminal = sys.stdout.isatty()
        self._thinking = False

    def write(self, piece: str, is_thought: bool) -> None:
        if is_thought and not self._terminal:
            return
        if is_thought != self._thinking:
            self._switch(is_thought)
        sys.stdout.write(piece)
        sys.stdout.flush()

    def _switch(self, is_thought: bool) -> None:
        self._thinking = is_thought
        if self._colours:
            sys.stdout.write(DIM if is_thought else PLAIN)
        if not is_thought:
            sys.stdout.write("\n\n")

    def end(self) -> None:
        if self._thinking and self._colours:
            sys.stdout.write(PLAIN)
        print(flush=True)


def lines(commands: Mapping[str, str]) -> Iterator[str]:
    """Lines that a person types, until Ctrl-D; Ctrl-C drops the line.

    With prompt_toolkit on a whole terminal: history, kept in a file of yours, and completion of commands and files.
    Otherwise plain input; where standard output is a pipe, the prompt goes to standard error.

    Args:
        commands: Names and what they do.
    """
    read = _toolkit(commands) if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
    while True:
        try:
            if read is not None:
                yield read()
            elif sys.stdout.isatty():
                yield input(PROMPT)
            else:
                print(PROMPT, end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if not line:
                    return
                yield line
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print()
            return


def _toolkit(commands: Mapping[str, str]) -> Callable[[], str] | None:
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion, PathCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import FileHistory, InMemoryHistory
    except ImportError:
        return None

    class Commands(Completer):
        """Commands at the beginning of a line, files after those that take one."""

        files = PathCompleter(expanduser=True)

        def get_completions(self, document: Any, event: Any) -> Iterable[Any]:
            text = document.text_before_cursor
            if not text.startswith("/"):
                return
            name, space, rest = text.partition(" ")
            if space and name in ("/add", "/save", "/load"):
                yield from self.files.get_completions(Document(rest, len(rest)), event)
            elif not space:
                for command, what in commands.items():
                    if command.startswith(name):
                        yield Completion(command, start_position=-len(name), display_meta=what)

    path = history_file()
    session: Any = PromptSession(
        history=FileHistory(str(path)) if path else InMemoryHistory(), completer=Commands(), complete_while_typing=False
    )
    return lambda: str(session.prompt(PROMPT))


def history_file() -> Path | None:
    """Where lines are remembered: `$XDG_STATE_HOME/twinkv-edge/history`, readable by you alone; None: nowhere."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    path = folder / "twinkv-edge" / "history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return path
    return None
