"""A conversation on a cache that may be compressed between turns. No terminal in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..bench.clock import rewind
from ..errors import CacheStateError, InputError
from . import thinking
from .generation import Answer, prefill, stream
from .options import AnswerOptions
from .prompt import ChatPrompt, common_prefix, shared_beginning

if TYPE_CHECKING:
    from ..llama import CompressedLlama
    from ..report import CompressionReport

Progress = Callable[[int], None]
Stopped = Callable[[], bool]
Message = dict[str, str]


def _ignore(done: int) -> None:
    pass


def _never() -> bool:
    return False


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class State:
    """Where a conversation stands.

    Attributes:
        messages: The finished ones; answers without their thinking.
        tokens: Of the conversation so far, documents that were read for the next message included. The cache holds
            them, the last of an answer perhaps not yet.
        turns: Answers so far.
        open: Text of those documents: the next message begins with it.
        n_before: Tokens before the next message.
        joint: The token between them and what follows; it is not in the cache, as the question may change it.
    """

    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    turns: int = 0
    open: str = ""
    n_before: int = 0
    joint: tuple[int, ...] = ()


class ChatSession:
    """Turns of a conversation; the cache only ever grows at its end, so nothing is evaluated twice.

    The tokens in the cache are the history, as they were generated: what the template would make of their text may
    differ, and would make the whole conversation be read again.

    Args:
        llm: With an empty cache.
        prompt: The model's chat template.
        options: How answers are sampled.
        system: The system prompt; never evicted.
    """

    def __init__(
        self, llm: CompressedLlama, prompt: ChatPrompt, options: AnswerOptions, *, system: str | None = None
    ) -> None:
        self.llm, self.prompt, self.options = llm, prompt, options
        self.state = State(messages=({"role": "system", "content": system},) if system else ())
        self.last: CompressionReport | None = None
        self.last_answer: Answer | None = None
        self.n_read = 0  # tokens of the last turn that were evaluated before its answer began
        self.n_protected = len(shared_beginning(self._prompt_with)) if system else 0
        self._earlier: list[State] = []  # what /undo goes back to

    @property
    def turns(self) -> int:
        return self.state.turns

    @property
    def tokens(self) -> list[int]:
        return list(self.state.tokens)

    @property
    def messages(self) -> list[Message]:
        return list(self.state.messages)

    def resume(self, state: State, n_protected: int) -> None:
        """Takes over a saved conversation, whose cache was loaded. It cannot be undone past here."""
        self.state, self.n_protected, self._earlier = state, n_protected, []
        self.last = self.last_answer = None

    # -- documents -----------------------------------------------------------------------------------------------

    def add(self, document: str, progress: Progress = _ignore, stopped: Stopped = _never) -> int:
        """Reads a document into the cache ahead of the next message, which will begin with it; returns its tokens.

        Raises:
            CacheStateError: It does not fit; nothing changed.
            Interrupted: `stopped()`; nothing changed but that some of it may be in the cache.
        """
        self.settle()
        now = self.state
        opened = f"{now.open}{document.rstrip()}\n\n"
        n_before = now.n_before if now.open else len(now.tokens)
        both = [self._prompt_with(text, opened) for text in ("Why?", "No.")]
        n = max(0, common_prefix(*both) - 1)
        tokens, joint = both[0][:n], both[0][n : n + 1]
        if not self._reuses(tokens):  # the cache cannot go back to where the last document was read to
            tokens = [
                *now.tokens,
                *now.joint,
                *self.prompt.vocabulary.tokenize(f"{document.rstrip()}\n\n", special=False),
            ]
            tokens, joint = tokens[:-1], tokens[-1:]
        prefill(self.llm, [*tokens, *joint], progress, stopped=stopped, n_protected=self.n_protected)
        self._earlier.append(now)
        self.state = replace(now, tokens=tuple(tokens), open=opened, n_before=n_before, joint=tuple(joint))
        return len(tokens) - len(now.tokens)

    def count(self, document: str) -> int:
        """Tokens that `add` would evaluate."""
        return len(self.prompt.vocabulary.tokenize(document, special=False))

    def _prompt_with(self, text: str, opened: str | None = None) -> list[int]:
        """Tokens of the conversation with a next message, up to where the answer begins."""
        now = self.state
        opened = now.open if opened is None else opened
        messages = [*now.messages, _user(opened + text)]
        if not now.turns:
            return self.prompt.begin(messages)
        before = now.tokens[: now.n_before] if now.open else now.tokens
        return [*before, *self.prompt.go_on(messages)]

    def _reuses(self, tokens: list[int]) -> bool:
        """Whether a prompt goes on from the cache without reaching into its compressed part."""
        cached = self.llm.input_ids[: self.llm.n_tokens].tolist()
        return common_prefix(cached, tokens) >= self.llm.kv.boundary

    # -- turns ---------------------------------------------------------------------------------------------------

    def ask(self, text: str, progress: Progress = _ignore, stopped: Stopped = _never) -> tuple[Answer, Iterator[str]]:
        """One turn: the answer, and its text piece by piece; the answer grows as the pieces are taken.

        A turn that fails leaves the conversation as it was; one that is stopped while it is answered keeps what was
        said so far.

        Raises:
            InputError: An empty message, or the template does not take the conversation.
            CacheStateError: The message does not fit.
        """
        text = text.strip()
        if not text:
            raise InputError("the message is empty")
        tokens = self._prompt_with(text)
        if not self._reuses(tokens):
            after = self.prompt.ending([*self.state.messages, _user(self.state.open + text)])
            question = self.prompt.vocabulary.tokenize(text, special=False)
            tokens = [*self.state.tokens, *self.state.joint, *question, *after]
        answer = Answer()
        return answer, self._pieces(text, tokens, answer, progress, stopped)

    def visible(self, pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
        """The pieces of an answer, each with whether it is thinking."""
        ending = self.prompt.ending([*self.state.messages, _user("?")])  # some templates begin the block themselves
        return thinking.split(pieces, inside=thinking.opened_by(self.prompt.vocabulary, ending) is not None)

    def _pieces(
        self, text: str, tokens: list[int], answer: Answer, progress: Progress, stopped: Stopped
    ) -> Iterator[str]:
        before, n = self.state, self.llm.n_tokens
        prefill(self.llm, tokens, progress, stopped=stopped, n_protected=self.n_protected)
        self.n_read = self.llm.n_tokens - n + 1
        yield from stream(self.llm, self.prompt.vocabulary, tokens, self.options, answer, stopped)
        self._earlier.append(before)
        history, said = self._without_thinking(tokens, answer)
        self.last_answer = answer
        self.state = State(
            messages=(*before.messages, _user(before.open + text), {"role": "assistant", "content": said}),
            tokens=tuple(history),
            turns=before.turns + 1,
        )

    def _without_thinking(self, prompt: list[int], answer: Answer) -> tuple[list[int], str]:
        """Tokens and text of a turn as the next ones see it.

        The cache follows when it goes on. Where the answer was compressed while it grew, it cannot go back, and the
        thinking stays in it.
        """
        opened = thinking.opened_by(self.prompt.vocabulary, prompt)
        parts = list(thinking.split([answer.text], inside=opened is not None))
        said = "".join(part for part, is_thought in parts if not is_thought)
        if opened is None and not any(is_thought for _, is_thought in parts):
            return [*prompt, *answer.tokens], answer.text
        start = len(prompt) if opened is None else opened
        if start < self.llm.kv.boundary:
            return [*prompt, *answer.tokens], said
        return [*prompt[:start], *thinking.without(self.prompt.vocabulary, answer.tokens)], said

    def settle(self) -> None:
        """Brings the cache to what the history says, before something looks at the cache itself."""
        tokens = self.tokens
        cached = self.llm.input_ids[: self.llm.n_tokens].tolist()
        if cached == tokens[: len(cached)]:
            return
        if tokens:
            prefill(self.llm, [*tokens, tokens[-1]], n_protected=self.n_protected)
        else:  # a first message or document whose reading was stopped
            self.llm.reset()

    def undo(self) -> str:
        """Takes back the last turn, or the last document if that came later; returns which, in words.

        Raises:
            InputError: There is nothing to take back.
            CacheStateError: It lies in the compressed part of the cache.
        """
        if not self._earlier:
            raise InputError("there is nothing to take back; what came before /load or a start from a session stays")
        now, then = self.state, self._earlier[-1]
        n = min(len(then.tokens), self.llm.n_tokens)
        boundary = self.llm.kv.boundary
        if n < boundary:
            raise CacheStateError(
                f"cannot take it back: it begins at token {n:,}, and the first {boundary:,} tokens were compressed "
                "as a whole, some of them evicted; start a new conversation to be without it"
            )
        rewind(self.llm, n)
        self._earlier.pop()
        self.state, self.last_answer = then, None
        return "turn" if now.turns > then.turns else "document"

    # -- the cache -----------------------------------------------------------------------------------------------

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
        self.settle()
        self.last = self.llm.compress(progress=lambda layer, _: progress(layer), **changes)
        return self.last

    def stats(self) -> dict[str, Any]:
        """Where the conversation stands: tokens, cells, bytes, speed, and the last compression."""
        footprint = self.llm.footprint()
        kv, answer = self.llm.kv, self.last_answer
        return {
            "turns": self.turns,
            "tokens": kv.n_tokens,
            "evicted": kv.n_tokens - kv.n_cells,
            "kept_by_tenth": kept_by_tenth([kv.positions(i).T for i in range(kv.n_layers)], kv.n_tokens),
            "cells": footprint.cells,
            "cells_allocated": footprint.cells_allocated,
            "bytes_used": footprint.bytes_used,
            "bytes_resident": footprint.bytes_resident,
            "ms_per_token": 1e3 * answer.seconds / len(answer.tokens) if answer and answer.tokens else None,
            "last_compression": self.last.to_dict() if self.last else None,
            "automatic_compressions": len(self.llm.compressions),
        }


def kept_by_tenth(positions: Any, n_tokens: int) -> list[float]:
    """Share of each tenth of the conversation that heads still hold, on average; positions: per layer [H, n_cells]."""
    import numpy as np

    if not n_tokens:
        return []
    edges = np.linspace(0, n_tokens, 11).round().astype(int)
    counts, heads = np.zeros(10), 0
    for layer in positions:
        held = layer[layer >= 0]
        counts += np.histogram(held, bins=edges)[0]
        heads += layer.shape[0]
    sizes = np.maximum(1, np.diff(edges))
    return [round(float(share), 4) for share in counts / sizes / heads]
