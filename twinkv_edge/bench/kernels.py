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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import twins
from ..backends import threads
from ..content import content
from ..errors import InputError
from ..repair import repair
from .kernel_figures import Figure, figures, markdown, plot

__all__ = ["Figure", "clustered_keys", "figures", "markdown", "plot", "run"]

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
DIMS = (64, 128)
WINDOW = 32
_REFERENCE_BYTES = 2 << 30  # of the n x n arrays that the numpy and PyTorch references need
_SLOW_S = 20.0  # a configuration whose last, smaller size took so long is not tried again

Keys = npt.NDArray[np.float32]


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
    operation: str  # twin_counts, best_twin, repair (the paper's) or repair by coverage
    backend: str  # or "numpy reference", "PyTorch"
    isa: str | None
    call: Callable[[Keys, npt.NDArray[np.bool_]], Any]

    @property
    def name(self) -> str:
        return f"{self.backend} {self.isa}" if self.isa else self.backend

    @property
    def is_reference(self) -> bool:
        return self.backend in ("numpy reference", "PyTorch")


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

            def cover(keys: Keys, kept: npt.NDArray[np.bool_], o: dict[str, Any] = options) -> Any:
                # as a compression calls it: keys and values side by side, here the same keys turned around
                vectors, weight = content(keys[None], keys[None, :, ::-1], n_threads=n_threads)
                return repair(vectors[0], kept, mode="coverage", weight=weight[0], local_window=WINDOW, **o)

            out.append(_Case("twin_counts", backend, isa, counts))
            out.append(_Case("best_twin", backend, isa, best))
            out.append(_Case("repair", backend, isa, swap))
            out.append(_Case("repair by coverage", backend, isa, cover))
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
        {"machine", "n_threads", "tau", "ratio", "peaks": {kind: operations per second}, "rows", "figures"}. A row has
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
    too_slow: set[_Case] = set()
    for number, (n, d) in enumerate(shapes):
        if progress:
            progress(f"n={n} d={d}", number, len(shapes))
        fit = [c for c in cases if c not in too_slow and (not c.is_reference or 8 * n * n <= _REFERENCE_BYTES)]
        data, kept = keys(n, d), np.random.default_rng(0).random(n) >= ratio
        spent = _time(fit, data, kept, repeats)
        too_slow |= {case for case, seconds in spent.items() if min(seconds) > _SLOW_S}
        here = [_row(case, n, d, seconds) for case, seconds in spent.items()]
        rows += [_compared(row, here, peaks) for row in here]
    result = {
        "machine": _machine(),
        "n_threads": n_threads,
        "tau": tau,
        "ratio": ratio,
        "peaks": peaks,
        "rows": rows,
    }
    return {**result, "figures": [figure.to_dict() for figure in figures(result)]}


def _time(cases: list[_Case], keys: Keys, kept: npt.NDArray[np.bool_], repeats: int) -> dict[_Case, list[float]]:
    """Seconds of every run. All cases run once, then all again: what else the machine does is spread over all."""
    spent: dict[_Case, list[float]] = {case: [] for case in cases}
    for repeat in range(repeats + 1):
        for case, seconds in spent.items():
            if repeat > 1 and sum(seconds) > _SLOW_S:
                continue
            if case.isa is not None:
                twins.set_isa(case.isa)
            try:
                began = time.perf_counter()
                case.call(keys, kept)
                took = time.perf_counter() - began
            finally:
                if case.isa is not None:
                    twins.set_isa(None)
            if repeat > 0 or took > _SLOW_S:  # the first run compiles and warms up
                seconds.append(took)
    return spent


def _row(case: _Case, n: int, d: int, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "operation": case.operation,
        "backend": case.backend,
        "isa": case.isa,
        "name": case.name,
        "n": n,
        "d": d,
        "seconds": median,
        "fastest": min(seconds),
        "rate": 2 * n * n * d / median,
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
