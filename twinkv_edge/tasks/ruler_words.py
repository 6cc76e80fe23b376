"""RULER's two counting tasks: common words of a numbered list, and frequent words of a coded text."""

from __future__ import annotations

import math
import random
import string

from . import words
from .base import Request, Sample, Task, largest

CWE_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10  # words to be found
SHORT = 4096  # tokens below which RULER repeats words less often

FWE_INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
CODED_LETTERS = 6
ZETA_2 = math.pi**2 / 6  # normalizes frequencies that fall as rank ** -2


class CommonWords(Task):
    name = "cwe"
    group = "ruler"
    summary = "The ten words that a numbered list repeats most, after a worked example."
    metric = "string_match_all"
    max_tokens = 120

    def sample(self, index: int, request: Request) -> Sample:
        short = request.length < SHORT
        repeats, rare_repeats = (6, 1) if short else (30, 3)
        rng = request.random(self.name, index)
        listed, common = _numbered(rng, *((20, 3, 1) if short else (40, 10, 3)))
        worked = CWE_INTRO + listed + CWE_QUESTION + CWE_PREFIX + " " + _enumerate(common) + "\n"
        main = rng.getrandbits(64)

        def make(n: int) -> Sample:
            listed, common = _numbered(random.Random(main), n, repeats, rare_repeats)
            context = worked + CWE_INTRO + listed
            return Sample(
                self.name, index, context, CWE_QUESTION, CWE_PREFIX, tuple(common), self.metric, self.max_tokens
            )

        return largest(
            make,
            lambda sample: request.count(sample.prompt) + sample.max_tokens,
            request.length,
            least=COMMON + 1,
            guess=request.length // 12,
            what=self.name,
        )


def _numbered(rng: random.Random, n: int, repeats: int, rare_repeats: int) -> tuple[str, list[str]]:
    """A shuffled, numbered list of n different words, the first ten of them common; and those."""
    known = words.all_words()
    chosen = rng.sample(known, min(n, len(known)))
    chosen += [
        f"{word}-{i // len(known)}" for i, word in zip(range(len(known), n), known * (n // len(known)), strict=False)
    ]
    common = chosen[:COMMON]
    listed = common * repeats + chosen[COMMON:] * rare_repeats
    rng.shuffle(listed)
    return _enumerate(listed), common


def _enumerate(listed: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


class FrequentWords(Task):
    name = "fwe"
    group = "ruler"
    summary = "The three most frequent words of a coded text, whose frequencies follow a zeta distribution."
    metric = "string_match_all"
    max_tokens = 50

    def sample(self, index: int, request: Request) -> Sample:
        rng = request.random(self.name, index)
        vocabulary: list[str] = []
        while len(vocabulary) < max(4, (request.length - self.max_tokens) // 50):
            word = "".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))
            if word not in vocabulary:
                vocabulary.append(word)
        vocabulary[0] = "..."  # the most frequent one is noise
        order = rng.getrandbits(64)

        def make(n: int) -> Sample:
            coded = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(n * k**-2 / ZETA_2))]
            random.Random(order).shuffle(coded)
            context = FWE_INTRO + " ".join(coded)
            answers = tuple(vocabulary[1:4])
            return Sample(self.name, index, context, FWE_QUESTION, FWE_PREFIX, answers, self.metric, self.max_tokens)

        return largest(
            make,
            lambda sample: request.count(sample.prompt) + sample.max_tokens,
            request.length,
            least=64,  # the fourth word appears twice, the third four times
            guess=request.length // 6,
            what=self.name,
        )


TASKS = (CommonWords, FrequentWords)
