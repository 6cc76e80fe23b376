"""MMLU-Pro (Wang et al., 2024): short multiple-choice questions. A control, that compression does no harm there.

Without worked examples and reasoning: the options are the context, and the model names the letter.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from ..errors import InputError
from . import files
from .base import Request, Sample
from .loaded import LoadedTask


class MMLUPro(LoadedTask):
    name = "mmlu_pro"
    group = "mmlu_pro"
    summary = "Multiple-choice questions with up to ten options, from MMLU-Pro's file."
    files = ("mmlu_pro", "mmlu-pro", "MMLU-Pro", "test", "test-00000-of-00001")
    metric = "choice"
    max_tokens = 16

    def made(self, index: int, row: dict[str, Any], path: Path, request: Request) -> Sample:
        options = [str(option) for option in files.field(row, path, "options") if str(option) != "N/A"]
        subject = row.get("category", "general knowledge")
        context = (
            f"The following is a multiple choice question (with answers) about {subject}.\n\n"
            f"Question: {files.field(row, path, 'question')}\nOptions:\n"
        )
        context += "".join(
            f"{letter}. {option}\n" for letter, option in zip(string.ascii_uppercase, options, strict=False)
        )
        answer = str(files.field(row, path, "answer"))
        sample = Sample(
            self.name, index, context, "Answer:", " The answer is (", (answer,), self.metric, self.max_tokens
        )
        if request.count(sample.prompt) + sample.max_tokens > request.length:
            raise InputError(f"{self.name}: question {index} does not fit in {request.length} tokens")
        return sample


TASKS = (MMLUPro,)
