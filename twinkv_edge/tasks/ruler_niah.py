"""RULER's eight needle tasks (Hsieh et al., 2024): magic values hidden in noise, in essays or among other needles."""

from __future__ import annotations

import random
import uuid
from typing import ClassVar

from . import words
from .base import Request, Sample, Task, largest

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INTRO = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat {are_all} the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"
DEPTHS = 40  # places between start and end of an essay where a needle can stand


class NeedleInAHaystack(Task):
    """One of the eight; the class attributes are RULER's configuration of it."""

    group = "ruler"
    metric = "string_match_all"
    max_tokens = 128
    haystack: ClassVar[str]  # "noise", "essay" or "needle"
    key_kind: ClassVar[str] = "words"
    value_kind: ClassVar[str] = "numbers"
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    def sample(self, index: int, request: Request) -> Sample:
        return largest(
            lambda n: self._make(n, index, request.random(self.name, index)),
            lambda sample: request.count(sample.prompt) + sample.max_tokens,
            request.length,
            least=max(self.keys, self.queries) * self.values,
            guess=request.length // 24,
            what=self.name,
        )

    def _make(self, n: int, index: int, rng: random.Random) -> Sample:
        """A sample with n sentences of haystack (noise: n blocks of five)."""
        start = rng.random()  # where in the essays to begin
        keys = [_value(self.key_kind, rng) for _ in range(max(self.keys, self.queries))]
        values = {key: [_value(self.value_kind, rng) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        asked = rng.sample(keys, self.queries)
        rng.shuffle(needles)
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        # RULER puts its template into the singular where one value is asked for
        single = self.queries * self.values == 1
        kind = self.value_kind[:-1] if single else self.value_kind
        are = "is" if single else "are"
        filled = {"kind": kind, "query": query, "are": are, "some": "A" if single else "Some"}
        filled["are_all"] = "is" if single else "are all"
        return Sample(
            self.name,
            index,
            INTRO.format(**filled) + self._hide(needles, n, start, rng),
            QUESTION.format(**filled),
            PREFIX.format(**filled),
            tuple(value for key in asked for value in values[key]),
            self.metric,
            self.max_tokens,
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _hide(self, needles: list[str], n: int, start: float, rng: random.Random) -> str:
        if self.haystack == "essay":
            essay = words.essay_sentences()
            first = int(start * len(essay))
            hay = [essay[(first + i) % len(essay)] for i in range(n)]
            depths = sorted(rng.sample(range(DEPTHS), len(needles)), reverse=True)
            for depth, needle in zip(depths, needles, strict=True):
                hay.insert(n * depth // (DEPTHS - 1), needle)
            return " ".join(hay)
        if self.haystack == "noise":
            hay = [words.NOISE] * n
        else:
            hay = [self._needle(_value(self.key_kind, rng), _value(self.value_kind, rng)) for _ in range(n)]
        places = sorted(rng.sample(range(n), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            hay.insert(place, needle)
        return "\n".join(hay)


def _value(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(words.adjectives())}-{rng.choice(words.nouns())}"


class Single1(NeedleInAHaystack):
    name = "niah_single_1"
    summary = "One number, hidden in repeated noise."
    haystack = "noise"


class Single2(NeedleInAHaystack):
    name = "niah_single_2"
    summary = "One number, hidden in essays."
    haystack = "essay"


class Single3(NeedleInAHaystack):
    name = "niah_single_3"
    summary = "One UUID, hidden in essays."
    haystack = "essay"
    value_kind = "uuids"


class MultiKey1(NeedleInAHaystack):
    name = "niah_multikey_1"
    summary = "One of four numbers, hidden in essays."
    haystack = "essay"
    keys = 4


class MultiKey2(NeedleInAHaystack):
    name = "niah_multikey_2"
    summary = "One number among nothing but such needles."
    haystack = "needle"


class MultiKey3(NeedleInAHaystack):
    name = "niah_multikey_3"
    summary = "One UUID, found by a UUID, among nothing but such needles."
    haystack = "needle"
    key_kind = "uuids"
    value_kind = "uuids"


class MultiValue(NeedleInAHaystack):
    name = "niah_multivalue"
    summary = "Four numbers for one key, hidden in essays."
    haystack = "essay"
    values = 4


class MultiQuery(NeedleInAHaystack):
    name = "niah_multiquery"
    summary = "Four keys, all of them asked for, hidden in essays."
    haystack = "essay"
    queries = 4


TASKS = (Single1, Single2, Single3, MultiKey1, MultiKey2, MultiKey3, MultiValue, MultiQuery)
