"""RULER's variable tracking: a chain of assignments scattered in noise, after one worked example."""

from __future__ import annotations

import itertools
import random
import string

from . import words
from .base import Request, Sample, Task, largest

INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the value "
    "{value}, they are: "
)
HOPS = 4
EXAMPLE_TOKENS = 500


class VariableTracking(Task):
    name = "vt"
    group = "ruler"
    summary = f"The {HOPS + 1} variables of a chain of {HOPS} hops, scattered in noise."
    metric = "string_match_all"
    max_tokens = 30

    def sample(self, index: int, request: Request) -> Sample:
        rng = request.random(self.name, index)
        example, main = rng.getrandbits(64), rng.getrandbits(64)
        shown = largest(
            lambda n: _make(n, index, random.Random(example), letters=3),
            lambda sample: request.count(sample.prompt),
            min(EXAMPLE_TOKENS, max(request.length // 3, 300)),
            least=HOPS + 1,
            guess=24,
            what="the worked example of vt",
        )
        worked = shown.prompt + " ".join(shown.answers) + "\n\n"
        return largest(
            lambda n: _make(n, index, random.Random(main), letters=5, before=worked),
            lambda sample: request.count(sample.prompt) + sample.max_tokens,
            request.length,
            least=HOPS + 1,
            guess=request.length // 24,
            what=self.name,
        )


def _make(n: int, index: int, rng: random.Random, letters: int, before: str = "") -> Sample:
    """A chain in n blocks of noise; its variables have names of so many letters."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    text = [words.NOISE] * n
    for done, place in enumerate(sorted(rng.sample(range(n), len(chain)))):
        text.insert(place + done, chain[done])
    filled = {"value": value, "n": len(names)}
    return Sample(
        VariableTracking.name,
        index,
        before + INTRO + "\n".join(text),
        QUESTION.format(**filled),
        PREFIX.format(**filled),
        tuple(names),
        VariableTracking.metric,
        VariableTracking.max_tokens,
    )


TASKS = (VariableTracking,)
