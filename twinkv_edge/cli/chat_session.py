"""A conversation on a cache that may be compressed between turns. No terminal in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .generation import Answer, prefill, stream
from .options import AnswerOptions
from .prompt import ChatPrompt, common_prefix, question_about

if TYPE_CHECKING:
    from ..llama import CompressedLlama
    from ..report import CompressionReport

Progress = Callable[[int], None]
Stopped = Callable[[], bool]


def _ignore(done: int) -> None:
    pass


def _never() -> bool:
    return False


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class ChatSession:
    """Turns of a conversation; the cache only ever grows at its end, so nothing is evaluated twice.

    The tokens in the cache are the history, as they were generated: what the template would make of their text may
    differ, and would make the whole conversation be read again.

    Args:
        llm: With an empty cache.
        prompt: The model's chat template.
        options: How answers are sampled.
        document: Put before the first message.
        system: The system prompt; never evicted.
    """

    def __init__(
        self,
        llm: CompressedLlama,
        prompt: ChatPrompt,
        options: AnswerOptions,
        *,
        document: str | None = None,
        system: str | None = None,
    ) -> None:
        self.llm, self.prompt, self.options = llm, prompt, options
        self.tokens: list[int] = []
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.turns = 0
        self.last: CompressionReport | None = None
        self._document = document
        self._n_protected = self._shared_beginning(lambda text: [*self.messages, _user(text)]) if system else 0

    def _first(self, text: str) -> list[dict[str, str]]:
        message = _user(text) if self._document is None else question_about(self._document, text)
        return [*self.messages, message]

    def _shared_beginning(self, messages: Callable[[str], list[dict[str, str]]]) -> int:
        """First tokens of a prompt that are the same whatever the user writes; where both meet, a token may differ."""
        one, other = (self.prompt.begin(messages(text)) for text in ("Why?", "No."))
        return max(0, common_prefix(one, other) - 1)

    def n_beginning(self) -> int:
        """Tokens that `read_document` evaluates."""
        return 0 if self._document is None else self._shared_beginning(self._first)

    def read_document(self, progress: Progress = _ignore, stopped: Stopped = _never) -> None:
        """Reads the document into the cache ahead of the first message, up to where that begins.

        Raises:
            CacheStateError: It does not fit.
            Interrupted: `stopped()`.
        """
        n = self.n_beginning()
        if n:
            tokens = self.prompt.begin(self._first("Why?"))[: n + 1]  # prefill leaves out the last
            prefill(self.llm, tokens, progress, stopped=stopped, n_protected=self._n_protected)

    def ask(self, text: str, progress: Progress = _ignore, stopped: Stopped = _never) -> tuple[Answer, Iterator[str]]:
        """One turn: the answer, and its text piece by piece; the answer grows as the pieces are taken.

        A turn that fails leaves the conversation as it was; one that is stopped while it is answered keeps what was
        said so far.

        Raises:
            InputError: An empty message, or the template does not take the conversation.
            CacheStateError: The message does not fit.
        """
        if not text.strip():
            raise InputError("the message is empty")
        if self.turns:
            messages = [*self.messages, _user(text)]
            tokens = self.tokens + self.prompt.go_on(messages)
        else:
            messages = self._first(text)
            tokens = self.prompt.begin(messages)
        answer = Answer()
        return answer, self._pieces(messages, tokens, answer, progress, stopped)

    def _pieces(
        self, messages: list[dict[str, str]], tokens: list[int], answer: Answer, progress: Progress, stopped: Stopped
    ) -> Iterator[str]:
        prefill(self.llm, tokens, progress, stopped=stopped, n_protected=self._n_protected)
        yield from stream(self.llm, self.prompt.vocabulary, tokens, self.options, answer, stopped)
        self.tokens = tokens + answer.tokens
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.turns += 1

    def compress(self, ratio: float | None = None, progress: Progress = _ignore) -> CompressionReport:
        """Evicts now, by the session's settings or to another ratio.

        Raises:
            InputError: The ratio is out of range, or leaves less than sinks and recent tokens.
            CacheStateError: There is nothing in the cache yet.
        """
        changes: dict[str, Any] = {} if ratio is None else {"ratio": ratio, "target_tokens": None}
        if ratio is not None:
            changes |= {
                "prefill": "full",
                "trigger_tokens": None,
            }  # they need target_tokens, and are for evicting later
        self.last = self.llm.compress(progress=lambda layer, _: progress(layer), **changes)
        return self.last

    def stats(self) -> dict[str, Any]:
        """Where the conversation stands: tokens, cells, bytes, and the last compression."""
        footprint = self.llm.footprint()
        return {
            "turns": self.turns,
            "tokens": self.llm.kv.n_tokens,
            "evicted": self.llm.kv.n_tokens - self.llm.kv.n_cells,
            "cells": footprint.cells,
            "cells_allocated": footprint.cells_allocated,
            "bytes_used": footprint.bytes_used,
            "bytes_resident": footprint.bytes_resident,
            "last_compression": self.last.to_dict() if self.last else None,
            "automatic_compressions": len(self.llm.compressions),
        }
