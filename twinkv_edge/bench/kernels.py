"""How fast the twin kernels are: every backend and instruction set, against numpy, PyTorch and this machine's peak.

A *rate* is 2 n^2 d / seconds: the multiply-adds of a full similarity matrix, whether a backend needs them or not, so
that rates compare as times do. The peaks are measured in the same run, so that a busy machine slows both.
"""

from __future__ import annotations

import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import twins
from ..backends import threads
from ..errors import InputError
from ..repair import repair

__all__ = ["Figure", "clustered_keys", "figures", "markdown", "plot", "run"]

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
DIMS = (64, 128)
WINDOW = 32
_REFERENCE_BYTES = 2 << 30  # of the n x n arrays that the numpy and PyTorch references need
_SLOW_S = 20.0  # a configuration whose last, smaller size took so long is not tried again

Keys = npt.NDArray[np.float32]


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


def clustered_keys(n: int, d: int, seed: int = 0) -> Keys:
    """Keys as a cache holds them: a common mean, topics that come and go, lengths of their own. float32 [n, d].

    At tau 0.85 about one pair in a thousand are twins, as in SmolLM2's cache (docs/kernels.md).
    """
    rng = np.random.default_rng(seed)
    topics = 1.1 * rng.standard_normal((64, d)) + rng.standard_normal(d)
    topic = np.repeat(rng.integers(64, size=n // 16 + 1), 16)[:n]
    keys = topics[topic] + 0.62 * rng.standard_normal((n, d))
    return (keys * rng.uniform(0.5, 2, (n, 1))).astype(np.float32)


def numpy_reference(keys: Keys, tau: float) -> npt.NDArray[np.intp]:
    """What one would write: normalize, multiply, mask, threshold, sum; all n x n at once."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    similarity = unit @ unit.T
    index = np.arange(len(keys))
    far = np.abs(index[:, None] - index[None, :]) > WINDOW
    counts: npt.NDArray[np.intp] = ((similarity > tau) & far).sum(axis=1)
    return counts


def _torch_reference(n_threads: int) -> Callable[[Keys, float], Any] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(n_threads)

    def reference(keys: Keys, tau: float) -> Any:
        unit = torch.nn.functional.normalize(torch.from_numpy(keys), dim=1)
        similarity = unit @ unit.T
        index = torch.arange(len(keys))
        far = (index[:, None] - index[None, :]).abs() > WINDOW
        return ((similarity > tau) & far).sum(dim=1)

    return reference


@dataclass(frozen=True)
class _Case:
    operation: str  # twin_counts, best_twin or repair
    backend: str  # or "numpy reference", "PyTorch"
    isa: str | None
    call: Callable[[Keys, npt.NDArray[np.bool_]], Any]

    @property
    def name(self) -> str:
        return f"{self.backend} {self.isa}" if self.isa else self.backend


def _cases(backends: Sequence[str], tau: float, n_threads: int) -> list[_Case]:
    out = [_Case("twin_counts", "numpy reference", None, lambda keys, _: numpy_reference(keys, tau))]
    if (torch := _torch_reference(n_threads)) is not None:
        out.append(_Case("twin_counts", "PyTorch", None, lambda keys, _: torch(keys, tau)))
    for backend in backends:
        isas: list[str | None] = [None]
        if backend == "native":
            isas = [name for name, here in twins.isas().items() if here]
        for isa in isas:
            options: dict[str, Any] = {"backend": backend, "n_threads": n_threads}

            def counts(keys: Keys, _: Any, o: dict[str, Any] = options) -> Any:
                return twins.twin_counts(keys, tau, WINDOW, **o)

            def best(keys: Keys, kept: npt.NDArray[np.bool_], o: dict[str, Any] = options) -> Any:
                return twins.best_twin(keys, kept, WINDOW, **o)

            def swap(keys: Keys, kept: npt.NDArray[np.bool_], o: dict[str, Any] = options) -> Any:
                return repair(keys, kept, tau=tau, local_window=WINDOW, **o)

            out.append(_Case("twin_counts", backend, isa, counts))
            out.append(_Case("best_twin", backend, isa, best))
            out.append(_Case("repair", backend, isa, swap))
    return out


def run(
    *,
    sizes: Sequence[int] = SIZES,
    dims: Sequence[int] = DIMS,
    backends: Sequence[str] | None = None,
    tau: float = 0.85,
    ratio: float = 0.5,
    repeats: int = 5,
    n_threads: int | None = None,
    keys: Callable[[int, int], Keys] = clustered_keys,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Times twin counts, best twins and repairs of one head.

    Args:
        sizes: Numbers of tokens n.
        dims: Dimensions d of a key.
        backends: Those to measure; None means all that can run here except the slow "numpy".
        tau: Similarity of a twin.
        ratio: Share of the tokens that are not retained, for best_twin and repair.
        repeats: Runs of each case, after one that is not timed.
        n_threads: None means one per core.
        keys: Makes keys float32 [n, d].
        progress: Called with (case, number, of how many) before each.

    Returns:
        {"machine", "n_threads", "tau", "ratio", "peaks": {kind: operations per second}, "rows": [...]}. A row has
        operation, backend, isa, n, d, seconds (median), fastest, rate, of_peak {kind: share}, vs_numpy and vs_torch
        (how many times as fast as the reference; None where that was too large to run).

    Raises:
        InputError: A backend that cannot run here, or sizes that are no sizes.
    """
    if repeats < 1 or not sizes or not dims or min(sizes) < 1 or min(dims) < 1:
        raise InputError("sizes, dims and repeats must be at least 1")
    n_threads = threads(n_threads)
    chosen = [b for b in twins.BACKENDS if b != "numpy" and twins.unavailable(b) is None]
    if backends is not None:
        chosen = [twins.active_backend(b) for b in backends]
    cases = _cases(chosen, tau, n_threads)
    shapes = [(n, d) for d in sorted(dims) for n in sorted(sizes)]
    rows: list[dict[str, Any]] = []
    peaks = _peaks(n_threads)
    too_slow: set[tuple[str, str]] = set()
    done = 0
    for n, d in shapes:
        data, kept = keys(n, d), np.random.default_rng(0).random(n) >= ratio
        here = []
        for case in cases:
            if progress:
                progress(f"{case.name} {case.operation} n={n} d={d}", done, len(cases) * len(shapes))
            done += 1
            is_reference = case.backend in ("numpy reference", "PyTorch")
            if (is_reference and 8 * n * n > _REFERENCE_BYTES) or (case.name, case.operation) in too_slow:
                continue
            row = _time(case, data, kept, repeats)
            if row["seconds"] > _SLOW_S:
                too_slow.add((case.name, case.operation))
            here.append(row)
        rows += [_compared(row, here, peaks) for row in here]
    return {
        "machine": _machine(),
        "n_threads": n_threads,
        "tau": tau,
        "ratio": ratio,
        "peaks": peaks,
        "rows": rows,
    }


def _time(case: _Case, keys: Keys, kept: npt.NDArray[np.bool_], repeats: int) -> dict[str, Any]:
    native = case.backend == "native"
    if native:
        twins.set_isa(case.isa)
    try:
        spent = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            case.call(keys, kept)
            spent.append(time.perf_counter() - began)
            if sum(spent) > _SLOW_S:
                break
    finally:
        if native:
            twins.set_isa(None)
    timed = spent[1:] or spent
    n, d = keys.shape
    return {
        "operation": case.operation,
        "backend": case.backend,
        "isa": case.isa,
        "name": case.name,
        "n": n,
        "d": d,
        "seconds": statistics.median(timed),
        "fastest": min(timed),
        "rate": 2 * n * n * d / statistics.median(timed),
    }


def _compared(row: dict[str, Any], others: list[dict[str, Any]], peaks: dict[str, float]) -> dict[str, Any]:
    def times_as_fast(reference: str) -> float | None:
        found = [o for o in others if o["backend"] == reference]
        return found[0]["seconds"] / row["seconds"] if found else None

    shares = {kind: row["rate"] / peak for kind, peak in peaks.items()}
    return {
        **row,
        "of_peak": shares,
        "vs_numpy": times_as_fast("numpy reference"),
        "vs_torch": times_as_fast("PyTorch"),
    }


def _peaks(n_threads: int) -> dict[str, float]:
    if twins.unavailable("native") is not None:
        return {}
    module: Any = importlib.import_module("twinkv_edge._native")
    best: dict[str, float] = {}
    for _ in range(3):
        for kind, rate in module.peaks(n_threads, 0.1).items():
            best[kind] = max(rate, best.get(kind, 0.0))
    return best


def _machine() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


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
    return [
        Figure(f"twin_counts ({best}) vs numpy", of(counts, "vs_numpy"), 38, 60),
        Figure("its rate / peak of bf16 AVX-512", counts["rate"] / bf16 if counts and bf16 else None, 1.1, 1.5),
        Figure("AVX2 vs numpy", max(times, default=None), 12, 18),
        Figure("best_twin / twin_counts, time", ratio, 0.9, 0.6, at_most=True),
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
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise InputError("plots need matplotlib: pip install 'twinkv-edge[bench]'") from e
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
    fig.savefig(path, dpi=140)
    plt.close(fig)
