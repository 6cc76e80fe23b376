"""How well a text goes on: likelihood of the true next tokens, and how far the prediction is from the full cache's.

Texts of different kinds, some shipped and some made here, or files of the user's.
"""

from __future__ import annotations

import random
import re
from importlib import resources
from typing import ClassVar

from ..errors import InputError
from . import words
from .base import Request, Sample, Task, largest

CONTINUATION = "continuation"  # stands for a metric: the likelihood of the answer, not of a generated text


class Continuation(Task):
    """One kind of text; each sample begins somewhere else in it."""

    group = "continuation"
    metric = CONTINUATION
    max_tokens = 0  # the request's

    def text(self, request: Request, index: int) -> str:
        raise NotImplementedError

    def sample(self, index: int, request: Request) -> Sample:
        if request.continuation < 1 or request.length <= request.continuation + 1:
            raise InputError(
                f"a length of {request.length} tokens leaves no context before a continuation of "
                f"{request.continuation}: ask for a greater length or a shorter continuation"
            )
        pieces = re.findall(r"\s*\S+", self.text(request, index))
        total = request.count("".join(pieces))
        if total < request.length:
            raise InputError(f"{self.name}: the text has {total} tokens, fewer than the length of {request.length}")
        spare = int(len(pieces) * (1 - request.length / total) * 0.9)
        first = request.random(self.name, index).randint(0, spare)
        context_tokens = request.length - request.continuation
        for start in (first, 0):
            context = largest(
                lambda n, start=start: "".join(pieces[start : start + n]),  # type: ignore[misc]
                request.count,
                context_tokens,
                least=1,
                guess=min(context_tokens, len(pieces)),
                what=self.name,
                most=len(pieces) - start,
            )
            used = len(re.findall(r"\s*\S+", context))
            rest = "".join(pieces[start + used : start + used + 2 * request.continuation])
            if request.count(rest) >= request.continuation:
                return Sample(self.name, index, context, "", "", (rest,), self.metric, request.continuation)
        raise InputError(f"{self.name}: the text ends before {request.continuation} tokens of continuation")


class _Shipped(Continuation):
    file: ClassVar[str]

    def text(self, request: Request, index: int) -> str:
        return resources.files(__package__).joinpath("data").joinpath(self.file).read_text(encoding="utf-8")


class Essay(_Shipped):
    name = "continue_essay"
    summary = "Goes on with expository prose."
    file = "essays.txt"


class Licence(_Shipped):
    name = "continue_licence"
    summary = "Goes on with the text of a licence."
    file = "licence.txt"


class Novel(_Shipped):
    name = "continue_novel"
    summary = "Goes on with a novel."
    file = "novel.txt"


class Dialogue(_Shipped):
    name = "continue_dialogue"
    summary = "Goes on with dialogue."
    file = "dialogue.txt"


class Code(_Shipped):
    name = "continue_code"
    summary = "Goes on with Python source."
    file = "code.txt"


class _Made(Continuation):
    """A text made line by line, as long as it takes."""

    @staticmethod
    def line(rng: random.Random, i: int) -> str:
        raise NotImplementedError

    def text(self, request: Request, index: int) -> str:
        rng = random.Random(f"{self.name}/{request.seed}/{index}")
        per_line = max(1, request.count(self.line(random.Random(0), 1)))
        return "\n".join(self.line(rng, i) for i in range(1, 2 * request.length // per_line + 40))


_PLACES = ("north depot", "old harbour", "mill road", "east gate", "station", "market hall", "pump house", "school")
_PEOPLE = ("A. Lind", "B. Okoro", "C. Moreau", "D. Tanaka", "E. Novak", "F. Silva", "G. Haddad", "H. Berg")


def _row(rng: random.Random, i: int) -> str:
    day = f"2023-{1 + i // 28 % 12:02}-{1 + i % 28:02}"
    return (
        f"| {i} | {day} | {rng.choice(_PLACES)} | {rng.choice(_PEOPLE)} | {rng.uniform(-5, 30):.1f} | "
        f"{rng.randint(0, 900)} | {rng.choice(('ok', 'ok', 'ok', 'late', 'missing'))} |"
    )


def _item(rng: random.Random, i: int) -> str:
    return f"{i}. {rng.randint(2, 60)} x {rng.choice(words.adjectives())} {rng.choice(words.nouns())}" + rng.choice(
        ("", "", f", for the {rng.choice(_PLACES)}", " (check the price first)", ", if there is any left")
    )


def _event(rng: random.Random, i: int) -> str:
    seconds = 3 * i + rng.randint(0, 2)
    time = f"{8 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    host = f"node-{rng.randint(1, 6)}"
    what = rng.choice(
        (
            f"INFO  request {rng.randrange(16**6):06x} served in {rng.randint(2, 400)} ms",
            f"INFO  connection from 10.0.{rng.randint(0, 3)}.{rng.randint(2, 250)} accepted",
            f"WARN  queue has {rng.randint(50, 500)} entries, slowing down",
            f"ERROR cannot reach {rng.choice(_PLACES).replace(' ', '-')}: timed out after {rng.randint(1, 30)} s",
        )
    )
    return f"{time} {host} {what}"


class Table(_Made):
    name = "continue_table"
    summary = "Goes on with a table of measurements."
    line = staticmethod(_row)


class Items(_Made):
    name = "continue_list"
    summary = "Goes on with a numbered list of things."
    line = staticmethod(_item)


class Log(_Made):
    name = "continue_log"
    summary = "Goes on with a server's log."
    line = staticmethod(_event)


class Files(Continuation):
    name = "continue_files"
    summary = "Goes on with the user's own texts (--text)."

    def missing(self, request: Request) -> str:
        return "" if request.texts else "it takes --text FILE"

    def text(self, request: Request, index: int) -> str:
        path = request.texts[index % len(request.texts)]
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise InputError(f"cannot read {path}: {e.strerror}") from e


TASKS = (Essay, Novel, Dialogue, Licence, Code, Table, Items, Log, Files)
