"""RULER's two question-answering tasks: SQuAD and HotpotQA paragraphs, the right ones among others."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InputError
from .base import Request, Sample, Task, largest

INTRO = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n"
)
QUESTION = (
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nQuestion: {query}"
)
PREFIX = " Answer:"


@dataclass(frozen=True)
class Asked:
    """A question with its answers: `right` documents must be there, `near` ones come first beside them."""

    query: str
    answers: tuple[str, ...]
    right: tuple[int, ...]
    near: tuple[int, ...] = ()


class QuestionAnswering(Task):
    group = "ruler"
    metric = "string_match_part"
    max_tokens = 32
    files: ClassVar[tuple[str, ...]]

    def missing(self, request: Request) -> str:
        return "" if self._path(request) else f"it takes --data FOLDER with {self.files[0]} in it"

    def _path(self, request: Request) -> Path | None:
        if request.data is None:
            return None
        return next((p for p in (request.data / name for name in self.files) if p.is_file()), None)

    @staticmethod
    @abstractmethod
    def parse(data: Any) -> tuple[list[Asked], list[str]]:
        """Questions and documents of the official file."""

    def size(self, request: Request) -> int | None:
        return len(self._load(request)[0])

    def _load(self, request: Request) -> tuple[list[Asked], list[str]]:
        path = self._path(request)
        if path is None:
            raise InputError(f"{self.name}: {self.missing(request)}")
        return _read(type(self), path)

    def sample(self, index: int, request: Request) -> Sample:
        asked, documents = self._load(request)
        if index >= len(asked):
            raise InputError(f"{self.name} has {len(asked)} samples: there is no number {index}")
        order = list(range(len(asked)))
        request.random(self.name, -1).shuffle(order)
        chosen = asked[order[index]]
        seed = request.random(self.name, index).getrandbits(64)

        def make(n: int) -> Sample:
            texts = [documents[i] for i in _among(chosen, len(documents), n, random.Random(seed))]
            context = INTRO + "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, 1))
            question = QUESTION.format(query=chosen.query)
            return Sample(self.name, index, context, question, PREFIX, chosen.answers, self.metric, self.max_tokens)

        return largest(
            make,
            lambda sample: request.count(sample.prompt) + sample.max_tokens,
            request.length,
            least=len(chosen.right),
            guess=max(len(chosen.right) + 1, request.length // 150),
            what=self.name,
            most=len(documents),
        )


def _among(chosen: Asked, total: int, n: int, rng: random.Random) -> list[int]:
    """n documents in random order: the right ones, then near ones, then any others."""
    near = rng.sample(chosen.near, len(chosen.near))
    known = {*chosen.right, *near}
    others = [i for i in rng.sample(range(total), min(total, n + len(known))) if i not in known]
    found = [*chosen.right, *near, *others][:n]
    rng.shuffle(found)
    return found


@lru_cache(maxsize=2)
def _read(task: type[QuestionAnswering], path: Path) -> tuple[list[Asked], list[str]]:
    try:
        asked, documents = task.parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{path} is not the official file of {task.name}: {type(e).__name__} {e}") from e
    if not asked:
        raise InputError(f"{path} holds no questions that can be answered")
    return asked, documents


class SQuAD(QuestionAnswering):
    name = "qa_1"
    summary = "SQuAD 2.0: a question about one of many paragraphs, from dev-v2.0.json."
    files = ("dev-v2.0.json", "squad.json")

    @staticmethod
    def parse(data: Any) -> tuple[list[Asked], list[str]]:
        documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
        number = {text: i for i, text in enumerate(documents)}
        asked = []
        for article in data["data"]:
            here = [number[p["context"]] for p in article["paragraphs"]]
            for p in article["paragraphs"]:
                right = number[p["context"]]
                near = tuple(i for i in dict.fromkeys(here) if i != right)
                for q in p["qas"]:
                    if not q.get("is_impossible"):
                        answers = tuple(dict.fromkeys(a["text"] for a in q["answers"]))
                        asked.append(Asked(q["question"], answers, (right,), near))
        return asked, documents


class HotpotQA(QuestionAnswering):
    name = "qa_2"
    summary = "HotpotQA: a question that takes two of many paragraphs, from hotpot_dev_distractor_v1.json."
    files = ("hotpot_dev_distractor_v1.json", "hotpotqa.json")

    @staticmethod
    def parse(data: Any) -> tuple[list[Asked], list[str]]:
        def text(title: str, sentences: list[str]) -> str:
            return f"{title}\n{''.join(sentences)}"

        documents = sorted({text(*p) for row in data for p in row["context"]})
        number = {document: i for i, document in enumerate(documents)}
        asked = []
        for row in data:
            titles = {title for title, _ in row.get("supporting_facts") or row["context"]}
            right = dict.fromkeys(number[text(*p)] for p in row["context"] if p[0] in titles)
            near = dict.fromkeys(number[text(*p)] for p in row["context"] if number[text(*p)] not in right)
            asked.append(Asked(row["question"], (row["answer"],), tuple(right), tuple(near)))
        return asked, documents


TASKS = (SQuAD, HotpotQA)
