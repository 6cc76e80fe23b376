"""One sample under every configuration: one prefill, one masked copy of its attention each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import plans
from ...compression import Compression
from ...errors import InputError
from ...llama import CompressedLlama
from ...pipeline import Plan
from ...tasks import Sample
from ...tasks.continuation import CONTINUATION
from ...tasks.metrics import METRICS
from . import answers, replies
from .settings import Settings


@dataclass
class Timer:
    """Seconds by stage, rounded for the results file."""

    seconds: dict[str, float]
    last: float

    @classmethod
    def start(cls) -> Timer:
        return cls({}, time.perf_counter())

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self.last, 3)
        self.last = now


def measure(llm: CompressedLlama, sample: Sample, settings: Settings) -> dict[str, Any]:
    """Answers a sample under every configuration.

    Returns:
        A line of the results file: "task", "index", "n_tokens", "seconds" by stage, and "outcomes", one for each
        configuration: "score" from 0 to 1, "text" and "swaps"; or "nll", "kl" and "swaps" of a continuation.
    """
    timer = Timer.start()
    compressions = [config.compression() for config in settings.configs]
    prefix, suffix = _tokens(llm, sample, settings)
    llm.compression = Compression(policy="none")
    llm.capture_for(*compressions)
    llm.reset()
    llm.eval(prefix)
    timer.stop("prefill")
    made = plans.make_plans(llm.kv, compressions, llm.facts.default_tau)
    llm.capture_for()  # nothing more is scored: decoding goes on as if no one watched
    timer.stop("plan")
    outcomes = (_continued if sample.metric == CONTINUATION else _answered)(llm, sample, suffix, made)
    timer.stop("answer")
    return {
        "task": sample.task,
        "index": sample.index,
        "n_tokens": len(prefix) + len(suffix),
        "seconds": timer.seconds,
        "outcomes": outcomes,
    }


def _tokens(llm: CompressedLlama, sample: Sample, settings: Settings) -> tuple[list[int], list[int]]:
    """What is evaluated before the eviction, and the rest of the prompt, of which the answer follows."""
    asked = sample.question + sample.answer_prefix
    if settings.question == "window" or not asked:
        tokens = llm.tokenize((sample.context + asked).encode(), add_bos=True, special=False)
        return tokens[:-1], tokens[-1:]
    context = llm.tokenize(sample.context.encode(), add_bos=True, special=False)
    return context, llm.tokenize(asked.encode(), add_bos=False, special=False)


def _answered(llm: CompressedLlama, sample: Sample, suffix: list[int], made: Sequence[Plan]) -> list[dict[str, Any]]:
    metric = METRICS[sample.metric]
    ends = answers.Ends(
        sample.max_tokens, lambda text: metric.is_settled(text, sample.answers), until_loop=metric.only_grows
    )
    return [
        {
            "score": round(metric.judge(text, sample.answers, sample.classes), 4),
            "swaps": plan.swaps,
            "text": text,
        }
        for plan, text in zip(made, replies.replies(llm, suffix, made, ends), strict=True)
    ]


def _continued(llm: CompressedLlama, sample: Sample, suffix: list[int], made: Sequence[Plan]) -> list[dict[str, Any]]:
    further = llm.tokenize(sample.answers[0].encode(), add_bos=False, special=False)[: sample.max_tokens]
    if len(further) < sample.max_tokens:
        raise InputError(f"{sample.task}: the text goes on for only {len(further)} of {sample.max_tokens} tokens")
    full = np.empty((len(further), llm.n_vocab()), dtype=np.float32)
    found: dict[int, answers.Likelihood] = {}
    outcomes = []
    copy = replies.Copies(llm)
    try:
        for number, (plan, same) in enumerate(zip(made, replies.distinct(made), strict=True)):
            if same == number:
                copy.keep(plan)
                found[number] = answers.likelihood(llm, suffix[-1], further, full, is_full=number == 0)
            each = found[same]
            outcomes.append({"nll": round(each.nll, 6), "kl": round(each.kl, 6), "swaps": plan.swaps})
    finally:
        copy.give_back()
    return outcomes
