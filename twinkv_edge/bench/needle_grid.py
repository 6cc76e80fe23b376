"""Where in a long text is a hidden number still found? Accuracy over depth and length, as a table and a heat map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..llama import CompressedLlama
from ..plotting import pyplot, save
from ..tasks import Sample
from ..tasks.base import largest
from ..tasks.needle import sample, sentences
from .quality.sample_run import measure
from .quality.settings import ALONE, FULL, Config, Settings

METRIC = "string_match_all"


def run(
    llm: CompressedLlama,
    haystack: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    configs: Sequence[Config],
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Hides a number at every depth of texts of every length, and asks for it under every configuration.

    Args:
        haystack: Prose; it is repeated where a length needs more.
        lengths: Tokens of prompt and answer.
        depths: From 0, the start, to 1.
        samples: Needles of every cell of the grid, by seeds 0, 1, ...
        configs: Compressions; the full cache is measured too.

    Returns:
        {"model", "lengths", "depths", "samples", "grids": [{"policy", "ratio", "repair", "layout", "tau",
        "accuracy"}]}, accuracy being a list over depths for each length.

    Raises:
        InputError: A depth is no share, or a length too small.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise InputError(f"a depth is {depth}: give a share of the text, from 0 to 1")
    every = (FULL, *(c for c in configs if c != FULL))
    found = np.zeros((len(every), len(lengths), len(depths)))
    for row, length in enumerate(lengths):
        settings = Settings(llm.facts.name, length, 0, "window", every, llm.n_threads)
        for column, depth in enumerate(depths):
            for seed in range(samples):
                hidden = fitted(llm, haystack, length, depth, seed)
                outcomes = measure(llm, hidden, settings)["outcomes"]
                found[:, row, column] += [outcome["score"] for outcome in outcomes]
            if progress:
                done = row * len(depths) + column + 1
                progress(f"[{done}/{len(lengths) * len(depths)}] {length} tokens, depth {depth:g}")
    grids = [
        {
            "policy": c.policy,
            "ratio": c.ratio,
            "repair": c.repair,
            "layout": c.layout,
            "tau": c.tau,
            "accuracy": np.round(grid / samples, 4).tolist(),
        }
        for c, grid in zip(every, found, strict=True)
    ]
    shared = {"lengths": list(lengths), "depths": list(depths), "samples": samples}
    return {"model": llm.facts.name, **shared, "grids": grids}


def fitted(llm: CompressedLlama, haystack: str, length: int, depth: float, seed: int) -> Sample:
    """A needle in as much of the haystack as fits in `length` tokens with the answer."""
    hay = sentences(haystack)
    if not hay:
        raise InputError("the haystack is empty")

    def make(n: int) -> Sample:
        needle = sample(" ".join(hay[i % len(hay)] for i in range(n)), seed, depth)
        return Sample("needle", seed, needle.context, needle.question, "", (needle.answer,), METRIC, needle.max_tokens)

    def tokens(made: Sample) -> int:
        return len(llm.tokenize(made.prompt.encode(), add_bos=True, special=False)) + made.max_tokens

    return largest(make, tokens, length, least=1, guess=max(2, length // 25), what="a needle")


def title(grid: dict[str, Any]) -> str:
    """Names a grid: the policy, what it removes, and the repair."""
    if grid["policy"] == FULL.policy:
        return "full cache"
    name = f"{grid['policy']} {grid['ratio']}" + ("" if grid["repair"] == ALONE else f" + {grid['repair']}")
    return name + (f", tau {grid['tau']}" if grid["tau"] is not None else "")


def markdown(result: dict[str, Any]) -> str:
    """One table per configuration: a row per length, a column per depth."""
    parts = [f"{result['model']}, {result['samples']} needles a cell."]
    for grid in result["grids"]:
        mean = float(np.mean(grid["accuracy"]))
        lines = [f"{title(grid)}: mean {mean:.2f}", ""]
        lines.append("| tokens | " + " | ".join(f"depth {d:g}" for d in result["depths"]) + " |")
        lines.append("|---:|" + "---:|" * len(result["depths"]))
        for length, row in zip(result["lengths"], grid["accuracy"], strict=True):
            lines.append(f"| {length} | " + " | ".join(f"{x:.2f}" for x in row) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """A heat map per configuration: depth downwards, length to the right, green where the number is found.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    grids = result["grids"]
    columns = min(4, len(grids))
    rows = -(-len(grids) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(2.8 * columns, 2.4 * rows), squeeze=False)
    for panel in panels.flat[len(grids) :]:
        panel.axis("off")
    for panel, grid in zip(panels.flat, grids, strict=False):
        cells = np.array(grid["accuracy"]).T
        panel.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (y, x), value in np.ndenumerate(cells):
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6)
        panel.set_xticks(range(len(result["lengths"])), result["lengths"], fontsize=6)
        panel.set_yticks(range(len(result["depths"])), [f"{d:g}" for d in result["depths"]], fontsize=6)
        panel.set_title(title(grid), fontsize=7)
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("depth", fontsize=8)
    figure.tight_layout()
    save(figure, path)
