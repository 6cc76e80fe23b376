"""What a task is: samples of a context, a question and what counts as right, made or loaded by name."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from ..errors import InputError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    The prompt is context + question + answer_prefix; the answer follows it directly.

    Attributes:
        task: Name of the task.
        index: Number of the sample in its task.
        context: What may be evicted from.
        question: What is asked about it.
        answer_prefix: The beginning of the answer, given to the model.
        answers: Reference answers; what they mean is the metric's business.
        metric: Name of a metric in `metrics.METRICS`, or "continuation".
        max_tokens: Tokens the answer may take.
        classes: All labels, for classification.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    classes: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True)
class Request:
    """What samples are made for.

    Attributes:
        length: Most tokens of prompt and answer together, as RULER counts them.
        count: Tokens that the model makes of a text.
        seed: Samples of different seeds differ; those of one seed are the same on every machine.
        data: Folder with the files of tasks that are loaded.
        texts: Text files to continue, of the task "continuation".
        continuation: Tokens of a continuation.
    """

    length: int
    count: Callable[[str], int]
    seed: int = 0
    data: Path | None = None
    texts: tuple[Path, ...] = ()
    continuation: int = 256

    def random(self, task: str, index: int) -> random.Random:
        """The source of randomness of one sample: a string as seed gives the same numbers on every machine."""
        return random.Random(f"{self.seed}/{task}/{index}")


class Task(ABC):
    """A named source of samples."""

    name: ClassVar[str]
    group: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[str]
    max_tokens: ClassVar[int]

    def missing(self, request: Request) -> str:
        """Why there can be no samples, in words; nothing when there can."""
        return ""

    def size(self, request: Request) -> int | None:
        """How many samples there are; None: as many as one likes."""
        return None

    @abstractmethod
    def sample(self, index: int, request: Request) -> Sample:
        """Sample number `index`, always the same for the same request.

        Raises:
            InputError: The length is too small for the task, or a file is not what it should be.
        """


def largest(
    make: Callable[[int], Made],
    tokens: Callable[[Made], int],
    limit: int,
    *,
    least: int,
    guess: int,
    what: str,
    most: int | None = None,
) -> Made:
    """The largest thing that fits: make(n) for the largest n, from `least` on, of at most `limit` tokens.

    Args:
        make: Makes it in size n; the same n must give the same thing.
        tokens: Its length, growing with n (small dips do no harm).
        guess: A size to start from.
        what: Name for the error.
        most: No size beyond this is tried.

    Raises:
        InputError: Not even the least size fits.
    """

    def fits(n: int) -> bool:
        return tokens(make(n)) <= limit

    if not fits(least):
        raise InputError(
            f"{what} does not fit in {limit} tokens: it needs {tokens(make(least))}; ask for a greater length"
        )
    end = max(most, least) + 1 if most is not None else None
    low, high = least, max(guess, least + 1)
    while (end is None or high < end) and fits(high):
        low, high = high, 2 * high
    high = high if end is None else min(high, end)  # `end` counts as too large
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return make(low)
