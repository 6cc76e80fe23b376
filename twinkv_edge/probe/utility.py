"""Does attention know what the answer needs? The leave-one-out probe of TwinKV, section 2.1.

A paragraph's *utility* is the drop of the right answer's log-probability when that paragraph, and only it, is left out
of the prompt. Its *attention* is what the prompt's last position paid to its tokens, over the last four layers and all
heads. If attention told what the model needs, the two would go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .. import policies, views
from ..errors import InputError
from ..llama import CompressedLlama
from ..plotting import pyplot, save
from ..policies.attention import window_attention
from .rank import spearman
from .samples import ProbeSample

LAST_LAYERS = 4


@dataclass(frozen=True)
class Chunk:
    """A paragraph: which sample's, how many tokens, whether the answer's words are in it, and the two measures.

    Attributes:
        attention: Share of the last position's attention, 0 to 1, summed over the paragraph's tokens.
        utility: Nats by which the answer gets less likely without it; negative: more likely.
    """

    sample: int
    index: int
    tokens: int
    holds_answer: bool
    attention: float
    utility: float


def probe(
    llm: CompressedLlama, sample: ProbeSample, number: int = 0, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Chunk], dict[str, float]]:
    """Measures every paragraph of one sample; the cache is used up.

    Returns:
        The chunks, and {"log_probability": of the answer given everything, "noise": by how many nats it differs when
        nothing is left out but the end is evaluated again, as in the other runs}.

    Raises:
        InputError: The tokenizer leaves nothing of a paragraph or of the answer.
        CacheStateError: The prompt does not fit.
    """
    pieces = [_tokens(llm, text) for text in sample.paragraphs]
    question, answer = _tokens(llm, sample.question), _tokens(llm, sample.answer)
    before = llm.tokenize(sample.before.encode(), add_bos=True, special=False)
    if not answer or not question or not all(pieces):
        raise InputError("a paragraph, the question or the answer has no tokens")
    starts = np.cumsum([len(before), *map(len, pieces)])
    llm.capture_for(policies.Needs(query_window=1))
    try:
        llm.reset()
        llm.eval([*before, *chain(*pieces), *question])
        attention = _last_position(llm)
        full = _answer(llm, answer)
        runs = len(pieces) + 1
        _rewind(llm, int(starts[-1]))
        llm.eval(question)
        noise = _answer(llm, answer) - full
        utilities = np.empty(len(pieces))
        # from the last to the first, so that what stands before a paragraph is always in the cache still
        for done, index in enumerate(reversed(range(len(pieces)))):
            _rewind(llm, int(starts[index]))
            llm.eval([*chain(*pieces[index + 1 :]), *question])
            utilities[index] = full - _answer(llm, answer)
            if progress:
                progress(done + 2, runs)
    finally:
        llm.capture_for()
    words = sample.answer.strip()
    chunks = [
        Chunk(
            sample=number,
            index=index,
            tokens=len(piece),
            holds_answer=words in sample.paragraphs[index],
            attention=float(attention[starts[index] : starts[index + 1]].sum()),
            utility=float(utilities[index]),
        )
        for index, piece in enumerate(pieces)
    ]
    return chunks, {"log_probability": full, "noise": abs(noise)}


def _tokens(llm: CompressedLlama, text: str) -> list[int]:
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False, special=False)
    return tokens


def _rewind(llm: CompressedLlama, n_tokens: int) -> None:
    if n_tokens == 0:
        llm.reset()  # models without a BOS token
    llm.n_tokens = n_tokens


def _last_position(llm: CompressedLlama) -> npt.NDArray[np.float64]:
    """What the last token attends to, mean over the last layers and all heads: float64 [n], its sum is 1."""
    kv = llm.kv
    layers = range(max(0, kv.n_layers - LAST_LAYERS), kv.n_layers)
    total = np.zeros(kv.n_cells)
    for index in layers:
        layer = views.parts(kv, index)[0].view
        total += window_attention(layer, layer.last_queries(1)).mean(axis=0)
    return total / len(layers)


def _answer(llm: CompressedLlama, answer: Sequence[int]) -> float:
    """Log-probability, in nats, of the answer after what is in the cache, token by token."""
    total = 0.0
    for number, token in enumerate(answer):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (llm.n_vocab(),)).astype(np.float64)
        top = logits.max()
        total += logits[token] - top - np.log(np.exp(logits - top).sum())
        if number + 1 < len(answer):
            llm.eval([token])
    return float(total)


def summary(model: str, chunks: Sequence[Chunk], samples: Sequence[dict[str, float]], seed: int) -> dict[str, Any]:
    """Everything, pooled over the samples as the paper does, as JSON has it.

    Raises:
        InputError: Fewer than three paragraphs in all.
    """
    rho, p = spearman([c.attention for c in chunks], [c.utility for c in chunks], seed=seed)
    return {
        "model": model,
        "rho": rho,
        "p": p,
        "n": len(chunks),
        "samples": list(samples),
        "noise": max(s["noise"] for s in samples),
        "chunks": [asdict(c) for c in chunks],
    }


def markdown(result: dict[str, Any]) -> str:
    """The result in a line, and the most useful and the most attended paragraphs, as Markdown."""
    chunks = result["chunks"]
    by_attention = sorted(chunks, key=lambda c: -c["attention"])
    place = {(c["sample"], c["index"]): k + 1 for k, c in enumerate(by_attention)}
    lines = [
        f"{result['model']}: Spearman rho = {result['rho']:.3f}, p = {result['p']:.4f} (permutations), "
        f"{result['n']} paragraphs of {len(result['samples'])} samples; noise of a repeated run "
        f"{result['noise']:.3f} nats.",
        "",
        "| sample | paragraph | tokens | utility, nats | attention, % | its place by attention | holds the answer |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    for c in sorted(chunks, key=lambda c: -c["utility"])[:12]:
        numbers = [str(c["sample"]), str(c["index"]), str(c["tokens"]), f"{c['utility']:.3f}"]
        numbers += [f"{100 * c['attention']:.2f}", str(place[c["sample"], c["index"]])]
        lines.append(f"| {' | '.join(numbers)} | {'yes' if c['holds_answer'] else ''} |")
    if len(chunks) > 12:
        lines.append(f"\nThe 12 most useful of {len(chunks)}; --json has all.")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Attention against utility, with the distribution of each at the margin, as a PNG.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    chunks = result["chunks"]
    fig = plt.figure(figsize=(6.4, 5.6), layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=(4, 1), height_ratios=(1, 4))
    main = fig.add_subplot(grid[1, 0])
    top, right = fig.add_subplot(grid[0, 0], sharex=main), fig.add_subplot(grid[1, 1], sharey=main)
    for holds, colour, label in ((False, "#0f8b8d", "other paragraphs"), (True, "#d1382f", "holds the answer")):
        points = [(100 * c["attention"], c["utility"]) for c in chunks if c["holds_answer"] is holds]
        if points:
            main.scatter(*zip(*points, strict=True), s=22, alpha=0.75, color=colour, label=label)
    top.hist([100 * c["attention"] for c in chunks], bins=30, color="#a9adb2")
    # almost all utilities are near zero and a few are large: linear within a nat, logarithmic beyond
    utilities = np.array([c["utility"] for c in chunks])
    bins = np.sinh(np.linspace(np.arcsinh(utilities.min()), np.arcsinh(utilities.max()), 31))
    right.hist(utilities, bins=np.unique(bins).tolist(), color="#a9adb2", orientation="horizontal")
    main.set_yscale("symlog", linthresh=1)
    main.axhline(0, color="#6a6f76", linewidth=0.8)
    main.set_xlabel("attention from the last position, %")
    main.set_ylabel("utility: drop in log-probability, nats")
    fig.legend(*main.get_legend_handles_labels(), loc="upper right", fontsize=7)  # where no point can be
    main.grid(alpha=0.3)
    for ax in (top, right):
        ax.tick_params(labelbottom=False, labelleft=False)
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(f"Spearman rho = {result['rho']:.3f}, p = {result['p']:.3f}, n = {result['n']}", fontsize=11)
    save(fig, path)
