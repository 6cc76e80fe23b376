"""LooGLE's four tasks (Li et al., 2024), with its prompts and lengths, from its files.

LooGLE judges by several metrics; here it is the share of clozes that are partly right, and ROUGE-L for the others.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

from . import files
from .base import Request, Sample
from .loaded import LoadedTask, fitted

_QA = "Please answer the question based on the long texts below. \n"


class LooGLE(LoadedTask):
    group = "loogle"
    before: ClassVar[str] = _QA
    after: ClassVar[str] = "\nQuestion: {question}\n"
    prefix: ClassVar[str] = "Answer: "
    metric = "rouge_l"

    def made(self, index: int, row: dict[str, Any], path: Path, request: Request) -> Sample:
        question = self.after.replace("{question}", str(row.get("question") or ""))
        context = fitted(
            str(files.field(row, path, "context", "input")),
            lambda text: request.count(self.before + text + question + self.prefix),
            request.length - self.max_tokens,
            self.name,
        )
        answers = self.references(files.field(row, path, "answer", "output"))
        return Sample(
            self.name, index, self.before + context, question, self.prefix, answers, self.metric, self.max_tokens
        )

    def references(self, answer: Any) -> tuple[str, ...]:
        return (str(answer),)


class ShortDependencyQA(LooGLE):
    name = "loogle_shortdep_qa"
    summary = "LooGLE's questions whose evidence stands in one place, from its file."
    files = ("shortdep_qa",)
    max_tokens = 300


class LongDependencyQA(LooGLE):
    name = "loogle_longdep_qa"
    summary = "LooGLE's questions whose evidence is scattered, from its file."
    files = ("longdep_qa",)
    max_tokens = 500


class Cloze(LooGLE):
    name = "loogle_shortdep_cloze"
    summary = "LooGLE's clozes: masked persons, places and organizations, from its file."
    files = ("shortdep_cloze",)
    before = (
        "Please fill in the clozes based on the given long texts below. Each of the placeholder '<mask-n>' in the "
        "question could be an entity of Person, Location or Organiocation. The same masks represent the same entity. "
        "Output a json format answer, for example: {'<mask-0>': 'Bob', '<mask-1>': 'Gorrosion Magazine',"
        "'<mask-2>': 'Bethel Horizon'}\n"
    )
    after = "\n Question: {question} What are the masked entities?\n"
    prefix = "Answer:"
    metric = "cloze_partial"
    max_tokens = 50

    def references(self, answer: Any) -> tuple[str, ...]:
        if isinstance(answer, str):  # a list or a dictionary in a string, as in some of its files
            try:
                answer = ast.literal_eval(answer)
            except (ValueError, SyntaxError):
                answer = [answer]
        if isinstance(answer, list):
            answer = {f"<mask-{i}>": value for i, value in enumerate(answer)}
        return (str(answer),)


class Summarization(LooGLE):
    name = "loogle_summarization"
    summary = "LooGLE's summaries of papers, from its file."
    files = ("summarization", "longdep_summarization")
    before = "Please generate a summary of the below paper. \n"
    after = "\n"
    prefix = "Summarization: "
    max_tokens = 500


TASKS = (ShortDependencyQA, LongDependencyQA, Cloze, Summarization)
