"""Thinking blocks of models like Qwen3: `<think>...</think>` before the answer, for the eye and not for the history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .prompt import Vocabulary

OPEN, CLOSE = "<think>", "</think>"


def split(pieces: Iterable[str], *, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Pieces of an answer, each with whether it is thinking; the tags are left out.

    A tag may come in several pieces, so what could be the beginning of one is held back. Only a block at the very
    beginning is thinking: later the tag is part of what the model says. White space around the block goes.

    Args:
        inside: The prompt opened the block already.
    """
    state = "thinking" if inside else "start"
    held = ""
    for piece in pieces:
        held += piece
        if state == "start":
            begun = held.lstrip()
            if begun.startswith(OPEN):
                state, held = "thinking", begun[len(OPEN) :]
            elif not OPEN.startswith(begun):
                state = "answer"
        if state == "thinking":
            text, closed, rest = held.partition(CLOSE)
            if closed:
                if text:
                    yield text, True
                state, held = "gap", rest
            else:
                keep = _overlap(held, CLOSE)
                text, held = held[: len(held) - keep], held[len(held) - keep :]
                if text:
                    yield text, True
        if state == "gap":
            held = held.lstrip()
            if held:
                state = "answer"
        if state == "answer" and held:
            yield held, False
            held = ""
    if held and state != "gap":
        yield held, state == "thinking"


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of the text that may be the beginning of the tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def opened_by(vocabulary: Vocabulary, prompt: list[int]) -> int | None:
    """Where in a prompt its last tokens open a thinking block; None: they do not."""
    text = ""
    for index in range(len(prompt) - 1, max(-1, len(prompt) - 9), -1):
        text = _text(vocabulary, prompt[index]) + text
        if text.strip() and not OPEN.endswith(text.strip()) and text.strip() != OPEN:
            return None
        if text.strip() == OPEN:
            return index
    return None


def without(vocabulary: Vocabulary, answer: list[int]) -> list[int]:
    """The tokens of an answer after its thinking block; none of them if it was never closed."""
    text = ""
    for index, token in enumerate(answer):
        text += _text(vocabulary, token)
        if CLOSE in text:
            rest = index + 1
            while rest < len(answer) and not _text(vocabulary, answer[rest]).strip():
                rest += 1
            return answer[rest:]
    return []


def _text(vocabulary: Vocabulary, token: int) -> str:
    """A token as text, control tokens too: some vocabularies have the tags as such."""
    return vocabulary.piece(token).decode("utf-8", errors="replace") or vocabulary.text(token)
