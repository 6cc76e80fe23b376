"""Twin prevalence: the share of tokens with at least one twin (TwinKV, section 2.2 and figure 1b)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import twins, views
from ..errors import CacheStateError, InputError
from ..llama import CompressedLlama
from ..plotting import pyplot, save

SWEEP = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95)


@dataclass(frozen=True)
class Prevalence:
    """Of one document, for one or more thresholds.

    Attributes:
        shares: Share of tokens with a twin, float64 [thresholds, L, H].
        taus: The thresholds; the first is the one in use.
    """

    document: str
    n_tokens: int
    taus: tuple[float, ...]
    shares: npt.NDArray[np.float64]

    @property
    def share(self) -> float:
        """Mean over layers and heads, at the threshold in use."""
        return float(self.shares[0].mean())

    @property
    def spread(self) -> float:
        """Standard deviation over layers and heads, at the threshold in use."""
        return float(self.shares[0].std())

    def to_dict(self) -> dict[str, Any]:
        return {
            "document": self.document,
            "tokens": self.n_tokens,
            "share": self.share,
            "spread": self.spread,
            "share_by_layer_and_head": self.shares[0].round(4).tolist(),
            "sweep": [
                {"tau": tau, "share": float(s.mean()), "spread": float(s.std())}
                for tau, s in sorted(zip(self.taus, self.shares, strict=True), key=lambda pair: pair[0])
            ],
        }


def prevalence(
    llm: CompressedLlama,
    document: str,
    taus: Sequence[float],
    local_window: int = 32,
    key_space: str = "rope",
    progress: Callable[[int, int], None] | None = None,
) -> Prevalence:
    """Measures the prompt that the cache holds.

    Args:
        llm: Its cache holds a prompt, whole.
        document: What to call it.
        taus: Thresholds, the one in use first.
        local_window, key_space: As in `Compression`.
        progress: Called with (layers done, layers).

    Raises:
        InputError: No threshold, or one is no similarity.
        CacheStateError: The cache is empty or was compressed.
    """
    kv = llm.kv
    if not taus:
        raise InputError("no threshold: give at least one tau")
    if kv.n_cells == 0 or kv.boundary:
        raise CacheStateError("twins are counted in a whole prompt: evaluate one, and count before compressing")
    shares = np.empty((len(taus), kv.n_layers, kv.n_head_kv))
    for index in range(kv.n_layers):
        layer = views.parts(kv, index, key_space)[0].view
        for k, tau in enumerate(taus):
            counts = twins.twin_counts(layer.compared_keys, tau, local_window, positions=layer.positions)
            shares[k, index] = (counts > 0).mean(axis=-1)
        if progress:
            progress(index + 1, kv.n_layers)
    return Prevalence(document, kv.n_tokens, tuple(taus), shares)


def summary(model: str, found: Sequence[Prevalence], local_window: int, key_space: str) -> dict[str, Any]:
    """All documents, as JSON has them. The spread over documents is what the paper's bars show."""
    means = np.array([p.share for p in found])
    return {
        "model": model,
        "tau": found[0].taus[0],
        "local_window": local_window,
        "key_space": key_space,
        "share": float(means.mean()),
        "spread_over_documents": float(means.std()),
        "documents": [p.to_dict() for p in found],
    }


def markdown(result: dict[str, Any]) -> str:
    """Tables: documents, thresholds if there are several, and layers."""
    documents = result["documents"]
    lines = [
        f"{result['model']}, tau {result['tau']:g}, local window {result['local_window']}: "
        f"{_percent(result['share'])} ± {_percent(result['spread_over_documents'])} % of tokens have a twin "
        "(mean and standard deviation over documents).",
        "",
        "| document | tokens | with a twin, % | spread over heads |",
        "|---|---:|---:|---:|",
        *(
            f"| {_cell(d['document'])} | {d['tokens']} | {_percent(d['share'])} | {_percent(d['spread'])} |"
            for d in documents
        ),
    ]
    names = " | ".join(_cell(d["document"]) for d in documents)
    rule = "---:|" * (1 + len(documents))
    if len(documents[0]["sweep"]) > 1:
        lines += ["", f"| tau | {names} |", f"|{rule}"]
        for rows in zip(*(d["sweep"] for d in documents), strict=True):
            lines.append(f"| {rows[0]['tau']:g} | {' | '.join(_percent(r['share']) for r in rows)} |")
    lines += ["", f"| layer (heads) | {names} |", f"|{rule}"]
    for layer, rows in enumerate(zip(*(d["share_by_layer_and_head"] for d in documents), strict=True)):
        cells = (f"{_percent(sum(r) / len(r))} ({' '.join(f'{100 * x:.0f}' for x in r)})" for r in rows)
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Bars per document with their spread over layers and heads, beside them the thresholds, as a PNG.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    documents = result["documents"]
    sweep = len(documents[0]["sweep"]) > 1
    fig, axes = plt.subplots(
        1, 2 if sweep else 1, figsize=(11 if sweep else 6, 4.4), layout="constrained", squeeze=False
    )
    bars = axes[0][0]
    shares = [100 * d["share"] for d in documents]
    spread = [100 * d["spread"] for d in documents]
    low = [min(s, e) for s, e in zip(shares, spread, strict=True)]  # a share is not below zero
    names = [d["document"].replace("$", r"\$") for d in documents]
    bars.bar(range(len(documents)), shares, yerr=[low, spread], capsize=4, color="#d9820b", ecolor="#6a6f76")
    bars.set_xticks(range(len(documents)), names, rotation=20, ha="right")
    bars.set_ylabel("tokens with a twin, %")
    bars.set_title(f"tau {result['tau']:g}; spread over layers and heads")
    if sweep:
        for d, name in zip(documents, names, strict=True):
            points = [(row["tau"], 100 * row["share"]) for row in d["sweep"]]
            axes[0][1].plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axes[0][1].axvline(result["tau"], color="#6a6f76", linewidth=0.8, linestyle=":")
        axes[0][1].set_xlabel("tau")
        axes[0][1].set_title("by threshold")
        axes[0][1].legend(fontsize=8)
    for ax in axes[0]:
        ax.grid(alpha=0.3, axis="y")
        ax.spines[["top", "right"]].set_visible(False)
    save(fig, path)
