"""Words and prose that generated tasks are made of."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from ..errors import InputError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _list(name: str) -> list[str]:
    try:
        text = resources.files("wonderwords").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
    except ModuleNotFoundError as e:
        raise InputError("RULER's word lists come with a package: pip install 'twinkv-edge[quality]'") from e
    return [w for w in text.split("\n") if w.strip()]


@cache
def nouns() -> tuple[str, ...]:
    return tuple(sorted(set(_list("nounlist.txt"))))


@cache
def adjectives() -> tuple[str, ...]:
    return tuple(sorted(set(_list("adjectivelist.txt"))))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs: some 7,000, as RULER's common-word task takes them."""
    return tuple(sorted({*nouns(), *adjectives(), *_list("verblist.txt")}))


@cache
def essay_sentences() -> tuple[str, ...]:
    """Sentences of the prose that the package ships (see data/NOTICE), in order: about 15,000 tokens."""
    text = resources.files(__package__).joinpath("data").joinpath("essays.txt").read_text(encoding="utf-8")
    return tuple(s for s in re.split(r"(?<=[.!?])\s+(?=[\"'(A-Z])", " ".join(text.split())) if s)
