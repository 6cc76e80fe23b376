"""Does the answer survive? Needle accuracy of policies, alone and repaired: one prefill, many compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import pipeline
from ..compression import Compression
from ..llama import CompressedLlama
from ..tasks.needle import Sample


@dataclass(frozen=True)
class Outcome:
    """One answer of one configuration."""

    config: str
    sample: int
    text: str
    right: bool
    swaps: int


def greedy(llm: CompressedLlama, tokens: Sequence[int], max_tokens: int) -> str:
    """Continues a prompt, without sampling, until the end of the turn or max_tokens."""
    out: list[int] = []
    for token in llm.generate(tokens, temp=0.0):
        out.append(token)
        if token == llm.token_eos() or len(out) == max_tokens:
            break
    return str(llm.detokenize(out, prev_tokens=list(tokens)), "utf-8", "replace")


def run(
    llm: CompressedLlama,
    samples: Iterable[Sample],
    configs: Mapping[str, Compression],
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Answers every sample under every configuration.

    A sample is evaluated once, all but its last token; every configuration decides on that cache and is applied to a
    copy of it, so that the first token of the answer already sees the compressed cache.
    """
    outcomes = []
    for number, sample in enumerate(samples):
        tokens = llm.tokenize((sample.context + sample.question).encode(), add_bos=True, special=False)
        llm.reset()
        llm.eval(tokens[:-1])
        plans = {
            name: pipeline.make_plan(llm.kv, cfg, llm.facts.default_tau if cfg.tau is None else cfg.tau)
            for name, cfg in configs.items()
        }
        state = llm.save_state()
        for done, (name, plan) in enumerate(plans.items()):
            llm.load_state(state)
            llm.kv.evict(plan.retained)
            text = greedy(llm, tokens, sample.max_tokens)
            outcomes.append(Outcome(name, number, text, sample.is_right(text), plan.swaps))
            if progress:
                progress(number * len(plans) + done + 1, len(plans))
    return outcomes


def accuracy(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Share of right answers per configuration."""
    right: dict[str, list[bool]] = {}
    for outcome in outcomes:
        right.setdefault(outcome.config, []).append(outcome.right)
    return {name: sum(marks) / len(marks) for name, marks in right.items()}
