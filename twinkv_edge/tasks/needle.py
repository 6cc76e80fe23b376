"""One needle in a haystack, in the style of RULER's niah_single (Hsieh et al., 2024): a 7-digit number in prose."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

WORDS = """
amber basalt cedar delta ember fjord garnet harbor indigo juniper kelp lantern meadow nectar orchid pebble quartz raven
saffron thistle umber velvet willow zephyr
""".split()  # noqa: SIM905  (words are read more easily without quotes)

INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {word} is: {number}."
QUESTION = (
    "\nWhat is the special magic number for {word} mentioned in the provided text? "
    "The special magic number for {word} mentioned in the provided text is"
)


@dataclass(frozen=True)
class Sample:
    """A prompt that ends where the answer begins.

    Attributes:
        context: Everything before the question.
        question: The question and the beginning of the answer, as RULER puts it.
        answer: The number, as digits.
        max_tokens: Tokens the answer may take.
    """

    context: str
    question: str
    answer: str
    max_tokens: int = 16

    def is_right(self, text: str) -> bool:
        """RULER's string match: the answer appears in what was generated."""
        return self.answer in text


def sentences(text: str) -> list[str]:
    """A text cut where sentences end, each with what follows it."""
    return [s for s in re.split(r"(?<=[.;:!?])\s+", " ".join(text.split())) if s]


def sample(haystack: str, seed: int, depth: float | None = None) -> Sample:
    """Hides one needle between two sentences of the haystack.

    Args:
        haystack: Prose; its length is the sample's length.
        seed: Chooses word, number and, unless given, depth.
        depth: Where the needle goes, 0 (start) to 1 (end); None: anywhere between 0.1 and 0.9.
    """
    rng = random.Random(seed)
    word, number = rng.choice(WORDS), str(rng.randint(1_000_000, 9_999_999))
    depth = rng.uniform(0.1, 0.9) if depth is None else depth
    hay = sentences(haystack)
    at = round(depth * len(hay))
    hay.insert(at, NEEDLE.format(word=word, number=number))
    return Sample(INTRO + " ".join(hay), QUESTION.format(word=word), number)
