"""LongBench's 16 English tasks (Bai et al., 2024), with its prompts, lengths and metrics, from its files.

A prompt is cut at the place of the text: what stands before it and the text are the context, the rest is the question.
Prompts longer than asked for lose the middle of their text, as the benchmark cuts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from . import files
from .base import Request, Sample
from .loaded import LoadedTask, fitted

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n",
    "\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:",
)
_UNANSWERABLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)

# name: what stands before the text, what after it, most tokens of an answer, metric
PROMPTS: dict[str, tuple[str, str, int, str]] = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: ",
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": (
        f"You are given a scientific article and a question. Answer the question {_UNANSWERABLE}Article: ",
        f"\n\n Answer the question based on the above article {_UNANSWERABLE}Question: {{input}}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": (*_PASSAGES, 32, "qa_f1"),
    "2wikimqa": (*_PASSAGES, 32, "qa_f1"),
    "musique": (*_PASSAGES, 32, "qa_f1"),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\n"
        "Answer:",
        512,
        "rouge_l",
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{input}",
        64,
        "classification",
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n",
        "\n\n{input}",
        32,
        "qa_f1_first_line",
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        "\n\n{input}",
        128,
        "rouge_l_first_line",
    ),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
        "only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n",
        "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is "
        'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
    "lcc": ("Please complete the code given below. \n", "Next line of code:\n", 64, "code_similarity"),
    "repobench-p": ("Please complete the code given below. \n", "{input}Next line of code:\n", 64, "code_similarity"),
}


class LongBench(LoadedTask):
    group = "longbench"
    parts: ClassVar[tuple[str, str]]

    def made(self, index: int, row: dict[str, Any], path: Path, request: Request) -> Sample:
        before, after = self.parts
        question = after.replace("{input}", str(files.field(row, path, "input")))
        context = fitted(
            str(files.field(row, path, "context")),
            lambda text: request.count(before + text + question),
            request.length - self.max_tokens,
            self.name,
        )
        answers = tuple(map(str, files.field(row, path, "answers")))
        classes = tuple(map(str, row.get("all_classes") or ()))
        return Sample(self.name, index, before + context, question, "", answers, self.metric, self.max_tokens, classes)


def _task(name: str) -> type[LongBench]:
    before, after, most, metric = PROMPTS[name]
    made = {
        "__doc__": f"LongBench's {name}.",
        "name": f"longbench_{name}",
        "summary": f"LongBench's {name}, from its file.",
        "files": (name,),
        "parts": (before, after),
        "max_tokens": most,
        "metric": metric,
    }
    return type(f"LongBench_{name}", (LongBench,), made)


TASKS = tuple(_task(name) for name in PROMPTS)
