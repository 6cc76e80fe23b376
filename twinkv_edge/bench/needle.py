"""Does the answer survive? Needle accuracy of policies, alone and repaired: one prefill, many compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import pipeline
from ..compression import Compression
from ..llama import CompressedLlama
from ..tasks.needle import Sample, sample
from .chosen import usable


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
    llm.capture_for(*configs.values())
    outcomes = []
    for number, needle in enumerate(samples):
        tokens = llm.tokenize((needle.context + needle.question).encode(), add_bos=True, special=False)
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
            text = greedy(llm, tokens, needle.max_tokens)
            outcomes.append(Outcome(name, number, text, needle.is_right(text), plan.swaps))
            if progress:
                progress(number * len(plans) + done + 1, len(plans))
    return outcomes


def accuracy(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Share of right answers per configuration."""
    right: dict[str, list[bool]] = {}
    for outcome in outcomes:
        right.setdefault(outcome.config, []).append(outcome.right)
    return {name: sum(marks) / len(marks) for name, marks in right.items()}


REPAIRS = {"alone": "none", "paper": "paper", "consistent": "consistent"}


def table(
    llm: CompressedLlama,
    haystack: str,
    *,
    samples: int = 12,
    ratios: Sequence[float] = (0.5, 0.7),
    names: Sequence[str] | None = None,
    tau: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Accuracy of every policy alone, with the paper's repair and with ours, on needles of seeds 0 .. samples - 1.

    Returns:
        {"model", "samples", "tau", "n_tokens", "full", "rows": [{"policy", "ratio", "alone", "paper", "consistent"}],
        "left_out": {policy: why}}
    """
    chosen, left_out = usable(llm, names)
    configs = {"full": Compression(policy="none")}
    for name in chosen:
        for ratio in ratios:
            for column, mode in REPAIRS.items():
                cfg = Compression(policy=name, ratio=ratio, repair=mode, tau=tau)  # type: ignore[arg-type]
                configs[f"{name} {ratio} {column}"] = cfg
    outcomes: list[Outcome] = []
    for seed in range(samples):
        outcomes += run(llm, [sample(haystack, seed)], configs)
        if progress:
            progress(f"[{seed + 1}/{samples}] needles")
    found = accuracy(outcomes)
    rows = [
        {"policy": name, "ratio": ratio, **{c: found[f"{name} {ratio} {c}"] for c in REPAIRS}}
        for ratio in ratios
        for name in chosen
    ]
    return {
        "model": llm.facts.name,
        "samples": samples,
        "tau": llm.facts.default_tau if tau is None else tau,
        "n_tokens": llm.n_tokens,
        "full": found["full"],
        "rows": rows,
        "left_out": left_out,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, as Markdown."""
    lines = [
        f"{result['model']}, {result['samples']} needles in about {result['n_tokens']} tokens, tau {result['tau']}; "
        f"full cache {result['full']:.2f}.",
        "",
        "| policy | ratio | alone | + paper | + consistent |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in result["rows"]:
        lines.append(f"| {r['policy']} | {r['ratio']} | {r['alone']:.2f} | {r['paper']:.2f} | {r['consistent']:.2f} |")
    lines += ["", *(f"Without {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip()
