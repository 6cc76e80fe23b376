"""What the leave-one-out probe asks about: a document cut into paragraphs, or a generated one."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ..errors import InputError
from ..tasks.needle import INTRO, NEEDLE, QUESTION, WORDS, sentences

SENTENCES = 2  # per paragraph of a generated sample
FEWEST_WORDS = 12  # a shorter paragraph, such as a heading, goes with the next


@dataclass(frozen=True)
class ProbeSample:
    """A question about paragraphs.

    Attributes:
        before: What stands before the paragraphs, never left out.
        paragraphs: Those that are left out, one at a time; each with the space that follows it.
        question: What comes after them, up to where the answer begins.
        answer: The right answer, with the space it begins with.
    """

    before: str
    paragraphs: tuple[str, ...]
    question: str
    answer: str


def paragraphs(text: str) -> list[str]:
    """A text cut at blank lines, each piece with what follows it."""
    found: list[str] = []
    pending = ""
    for piece in re.split(r"(?<=\n)(?:[ \t]*\n)+", text.strip() + "\n"):
        pending += piece.rstrip() + "\n\n"
        if len(pending.split()) >= FEWEST_WORDS:
            found.append(pending)
            pending = ""
    if pending:
        found[-1:] = ["".join(found[-1:]) + pending]
    return found


def about(document: str, question: str, answer: str) -> ProbeSample:
    """A user's document, question and right answer.

    Raises:
        InputError: The document is one paragraph, or the question or the answer is empty.
    """
    if not question.strip() or not answer.strip():
        raise InputError("a probe needs a question and its right answer: neither may be empty")
    pieces = paragraphs(document)
    if len(pieces) < 2:
        raise InputError("the document has one paragraph: separate those to leave out by blank lines")
    return ProbeSample("", tuple(pieces), f"Question: {question.strip()}\nAnswer:", " " + answer.strip())


def generated(prose: str, seed: int) -> ProbeSample:
    """Paragraphs of prose in random order. One holds the number that is asked for, every third another number, so that
    more than the answer's own place bears on the answer.

    Raises:
        InputError: The prose is too short.
    """
    rng = random.Random(seed)
    every = sentences(prose)
    pieces = [every[i : i + SENTENCES] for i in range(0, len(every) - SENTENCES + 1, SENTENCES)]
    if len(pieces) < 4:
        raise InputError(f"the prose has {len(every)} sentences: at least {4 * SENTENCES} are needed")
    rng.shuffle(pieces)
    holders = rng.sample(range(len(pieces)), min(len(WORDS), 1 + len(pieces) // 3))
    words = rng.sample(WORDS, len(holders))
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in holders]
    for place, word, number in zip(holders, words, numbers, strict=True):
        pieces[place].insert(rng.randint(0, SENTENCES), NEEDLE.format(word=word, number=number))
    texts = tuple(" ".join(piece) + "\n\n" for piece in pieces)
    return ProbeSample(INTRO, texts, QUESTION.format(word=words[0]).lstrip("\n"), " " + numbers[0])
