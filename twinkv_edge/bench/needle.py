"""Does the answer survive? Needle accuracy of policies, alone and repaired: one prefill, many compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plans
from ..compression import Compression
from ..llama import CompressedLlama
from ..plotting import grouped_bars, pyplot, save
from ..tasks.needle import Sample, sample
from .chosen import usable
from .quality.answers import Ends
from .quality.replies import replies


@dataclass(frozen=True)
class Outcome:
    """One answer of one configuration."""

    config: str
    sample: int
    text: str
    right: bool
    swaps: int


def run(
    llm: CompressedLlama,
    samples: Iterable[Sample],
    configs: Mapping[str, Compression],
) -> list[Outcome]:
    """Answers every sample under every configuration.

    A sample is evaluated once, all but its last token; every configuration decides on that cache and is applied to a
    copy of it, so that the first token of the answer already sees the compressed cache. Where heads keep different
    tokens the copy is a mask, bit for bit what the evicted cache gives (tests/test_bench_quality.py).
    """
    outcomes = []
    for number, needle in enumerate(samples):
        llm.capture_for(*configs.values())
        tokens = llm.tokenize((needle.context + needle.question).encode(), add_bos=True, special=False)
        llm.reset()
        llm.eval(tokens[:-1])
        made = plans.make_plans(llm.kv, list(configs.values()), llm.facts.default_tau)
        llm.capture_for()
        texts = replies(llm, tokens[-1:], made, Ends(needle.max_tokens, needle.is_right))
        for name, plan, text in zip(configs, made, texts, strict=True):
            outcomes.append(Outcome(name, number, text, needle.is_right(text), plan.swaps))
    return outcomes


def accuracy(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Share of right answers per configuration."""
    right: dict[str, list[bool]] = {}
    for outcome in outcomes:
        right.setdefault(outcome.config, []).append(outcome.right)
    return {name: sum(marks) / len(marks) for name, marks in right.items()}


COLUMNS = {"alone": "none", "paper": "paper", "coverage": "coverage"}  # and the repairs they stand for


def table(
    llm: CompressedLlama,
    haystack: str,
    *,
    samples: int = 12,
    first: int = 0,
    ratios: Sequence[float] = (0.5, 0.7),
    names: Sequence[str] | None = None,
    tau: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Accuracy of every policy alone, with the paper's repair and with ours.

    Args:
        samples, first: Needles of the seeds first .. first + samples - 1.

    Returns:
        {"model", "samples", "first_seed", "tau", "n_tokens", "full", "rows": [{"policy", "ratio", "alone", "paper",
        "coverage"}], "left_out": {policy: why}}
    """
    chosen, left_out = usable(llm, names)
    configs = {"full": Compression(policy="none")}
    for name in chosen:
        for ratio in ratios:
            for column, mode in COLUMNS.items():
                cfg = Compression(policy=name, ratio=ratio, repair=mode, tau=tau)  # type: ignore[arg-type]
                configs[f"{name} {ratio} {column}"] = cfg
    outcomes: list[Outcome] = []
    done = 0
    try:
        while done < samples:
            outcomes += run(llm, [sample(haystack, first + done)], configs)
            done += 1
            if progress:
                progress(f"[{done}/{samples}] needles")
    except KeyboardInterrupt:  # what was answered is worth showing
        if not done:
            raise
        if progress:
            progress(f"interrupted: the table is of {done} needles")
    found = accuracy(outcomes)
    rows = [
        {"policy": name, "ratio": ratio, **{c: found[f"{name} {ratio} {c}"] for c in COLUMNS}}
        for ratio in ratios
        for name in chosen
    ]
    return {
        "model": llm.facts.name,
        "samples": done,
        "first_seed": first,
        "tau": llm.facts.default_tau if tau is None else tau,
        "n_tokens": llm.n_tokens,
        "full": found["full"],
        "rows": rows,
        "left_out": left_out,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, as Markdown."""
    lines = [
        f"{result['model']}, {result['samples']} needles (seeds from {result['first_seed']}) in about "
        f"{result['n_tokens']} tokens, tau {result['tau']}; "
        f"full cache {result['full']:.2f}.",
        "",
        "| policy | ratio | alone | + paper | + coverage |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in result["rows"]:
        lines.append(f"| {r['policy']} | {r['ratio']} | {r['alone']:.2f} | {r['paper']:.2f} | {r['coverage']:.2f} |")
    for ratio in dict.fromkeys(r["ratio"] for r in result["rows"]):
        rows = [r for r in result["rows"] if r["ratio"] == ratio]
        means = " | ".join(f"**{sum(r[c] for r in rows) / len(rows):.2f}**" for c in COLUMNS)
        lines.append(f"| **mean** | {ratio} | {means} |")
    lines += ["", *(f"Without {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip()


def plot(result: dict[str, Any], path: str | Path) -> None:
    """The table as bars, a panel per ratio, as a PNG.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    ratios = list(dict.fromkeys(r["ratio"] for r in result["rows"]))
    fig, panels = plt.subplots(len(ratios), 1, figsize=(9, 2.4 * len(ratios)), sharex=True, squeeze=False)
    for ax, ratio in zip(panels[:, 0], ratios, strict=True):
        rows = [r for r in result["rows"] if r["ratio"] == ratio]
        labels = {column: column if column == "alone" else f"+ {column}" for column in COLUMNS}
        grouped_bars(ax, {label: {r["policy"]: r[column] for r in rows} for column, label in labels.items()})
        ax.set(ylim=(0, 1.02), ylabel=f"found, {ratio:.0%} removed")
        ax.axhline(result["full"], color="0.4", linewidth=0.8, linestyle="--")
    panels[0, 0].legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(fig, path)
