"""What `bench kernels` measured, as figures with a bar, as Markdown and as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import twins
from ..plotting import pyplot, save

__all__ = ["Figure", "figures", "markdown", "plot"]


@dataclass(frozen=True)
class Figure:
    """A figure that has a bar to clear.

    Attributes:
        what: What was measured.
        got: The figure, or None where it could not be measured here.
        reach: The bar.
        beyond: Where it is wanted.
        at_most: Whether the figure has to stay below the bar instead of above it.
    """

    what: str
    got: float | None
    reach: float
    beyond: float | None = None
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the bar is cleared; None where there is no figure."""
        if self.got is None:
            return None
        return self.got <= self.reach if self.at_most else self.got >= self.reach

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def _find(result: dict[str, Any], operation: str, name: str, n: int, d: int) -> dict[str, Any] | None:
    for row in result["rows"]:
        if (row["operation"], row["name"], row["n"], row["d"]) == (operation, name, n, d):
            found: dict[str, Any] = row
            return found
    return None


def figures(result: dict[str, Any], n: int = 8192, d: int = 128) -> list[Figure]:
    """The figures that have a bar, from what run() returned for n tokens of d dimensions."""
    best = f"native {twins.isa()}" if twins.unavailable("native") is None else "native"
    counts, best_twin = (_find(result, operation, best, n, d) for operation in ("twin_counts", "best_twin"))
    avx2 = [_find(result, "twin_counts", f"native {isa}", n, d) for isa in ("avx2", "avx2int8")]
    numba = _find(result, "twin_counts", "numba", n, d)
    bf16 = result["peaks"].get("bf16 AVX-512")

    def of(row: dict[str, Any] | None, key: str) -> float | None:
        value: float | None = row[key] if row else None
        return value

    times = [t for row in avx2 if (t := of(row, "vs_numpy")) is not None]
    ratio = best_twin["seconds"] / counts["seconds"] if best_twin and counts else None
    rule, ours = (_find(result, operation, best, n, d) for operation in ("repair", "repair by coverage"))
    return [
        Figure(f"twin_counts ({best}) vs numpy", of(counts, "vs_numpy"), 38, 60),
        Figure("its rate / peak of bf16 AVX-512", counts["rate"] / bf16 if counts and bf16 else None, 1.1, 1.5),
        Figure("AVX2 vs numpy", max(times, default=None), 12, 18),
        Figure("best_twin / twin_counts, time", ratio, 0.9, 0.6, at_most=True),
        Figure(
            "repair by coverage / the paper's, time",
            ours["seconds"] / rule["seconds"] if ours and rule else None,
            1.5,
            at_most=True,
        ),
        Figure("numba vs numpy", of(numba, "vs_numpy"), 5),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables, as Markdown: peaks, every case, and the figures that have a bar where they were measured."""
    peaks = ", ".join(f"{kind} {rate / 1e9:,.0f}" for kind, rate in result["peaks"].items()) or "not measured"
    lines = [
        f"{result['machine']}, {result['n_threads']} threads, tau {result['tau']}, ratio {result['ratio']}.",
        f"Peaks, GF/s: {peaks}.",
        "",
        "| operation | backend | n | d | ms | GF/s | of best peak | vs numpy | vs PyTorch |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        share = f"{min(row['of_peak'].values()):.2f}" if row["of_peak"] else ""
        ratios = [f"{row[k]:.1f}x" if row[k] else "" for k in ("vs_numpy", "vs_torch")]
        numbers = [f"{row['n']}", f"{row['d']}", f"{1e3 * row['seconds']:.2f}", f"{row['rate'] / 1e9:,.0f}", share]
        lines.append(f"| {' | '.join([row['operation'], row['name'], *numbers, *ratios])} |")
    known = [f for f in figures(result) if f.got is not None]
    if known:
        lines += ["", "| n=8192 d=128 | measured | reach | beyond | holds |", "|---|---:|---:|---:|---|"]
        for f in known:
            sign = "<=" if f.at_most else ">="
            beyond = "" if f.beyond is None else f"{sign} {f.beyond}"
            lines.append(f"| {f.what} | {f.got:.2f} | {sign} {f.reach} | {beyond} | {'yes' if f.holds else 'no'} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Rates of twin_counts over n, a panel per d, with the peaks as lines, as a PNG.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    dims = sorted({row["d"] for row in result["rows"]})
    fig, axes = plt.subplots(1, len(dims), figsize=(6 * len(dims), 5), layout="constrained", squeeze=False)
    for ax, d in zip(axes[0], dims, strict=True):
        rows = [r for r in result["rows"] if r["d"] == d and r["operation"] == "twin_counts"]
        for name in dict.fromkeys(r["name"] for r in rows):
            points = [(r["n"], r["rate"] / 1e9) for r in rows if r["name"] == name]
            ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        for kind, rate in result["peaks"].items():
            ax.axhline(rate / 1e9, color="gray", linewidth=0.8, linestyle=":")
            ax.annotate(f"peak {kind}", (min(r["n"] for r in rows), rate / 1e9), fontsize=7, color="gray")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("tokens n")
        ax.set_ylabel("2 n² d / time, GF/s")
        ax.set_title(f"twin_counts, d = {d}")
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize=7)
    save(fig, path)
