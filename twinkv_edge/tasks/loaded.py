"""Tasks whose samples come out of a file: what LongBench, LooGLE and MMLU-Pro share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InputError
from . import files
from .base import Request, Sample, Task


class LoadedTask(Task):
    """A task with a file of its own, `files` being its names without their endings."""

    files: ClassVar[tuple[str, ...]]

    def missing(self, request: Request) -> str:
        if request.data is None:
            return "it takes --data FOLDER, with its official files"
        if files.find(request.data, *self.files) is None:
            return f"{request.data} holds no {self.files[0]}.jsonl, .json or .parquet"
        return ""

    def size(self, request: Request) -> int | None:
        return len(self.rows(request)[1])

    def rows(self, request: Request) -> tuple[Path, list[dict[str, Any]]]:
        """The file and its rows. Raises InputError where there is none."""
        path = files.find(request.data, *self.files) if request.data else None
        if path is None:
            raise InputError(f"{self.name}: {self.missing(request)}")
        return path, files.rows(path)

    def sample(self, index: int, request: Request) -> Sample:
        path, rows = self.rows(request)
        if index >= len(rows):
            raise InputError(f"{self.name} has {len(rows)} samples: there is no number {index}")
        order = list(range(len(rows)))
        request.random(self.name, 0).shuffle(order)  # a few samples are then not all of one document
        return self.made(order[index], rows[order[index]], path, request)

    @abstractmethod
    def made(self, index: int, row: dict[str, Any], path: Path, request: Request) -> Sample:
        """The sample of a row."""


def fitted(text: str, tokens: Callable[[str], int], limit: int, what: str) -> str:
    """The text, or its first and last part where `tokens` of it are more than the limit: LongBench cuts in the middle.

    Args:
        tokens: Length of the whole prompt around such a text.

    Raises:
        InputError: The prompt without any text is longer than the limit.
    """
    if tokens(text) <= limit:
        return text
    if tokens("") > limit:
        raise InputError(f"{what}: the question alone does not fit in {limit} tokens: ask for a greater length")
    low, high = 0, len(text) // 2  # characters kept at either end
    while high - low > 1:
        middle = (low + high) // 2
        if tokens(text[:middle] + text[len(text) - middle :]) <= limit:
            low = middle
        else:
            high = middle
    return text[:low] + text[len(text) - low :]
