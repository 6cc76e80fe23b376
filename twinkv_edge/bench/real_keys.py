"""The twin kernels on the keys of a real cache: every count of every head against the definition, and the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import twins
from ..compression import Compression
from ..llama import CompressedLlama
from . import prose
from .kernels import WINDOW, numpy_reference

TIMED_HEADS = 5


def run(
    model: str | Path,
    *,
    n_tokens: int = 6144,
    tau: float = 0.85,
    n_threads: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Fills a cache with text and counts the twins of every head twice: with the kernels in use, and in double
    precision as docs/kernels.md defines them (the numpy backend).

    Returns:
        {"model", "n_tokens", "n_heads" (layers x KV heads), "d", "tau", "backend", "mismatches" (tokens whose counts
        differ, over all heads), "with_twins" (share of tokens that have any), "vs_numpy" (how many times as fast as
        the float32 numpy reference, median over some heads)}
    """
    llm = CompressedLlama(
        str(model),
        n_ctx=n_tokens + 64,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        compression=Compression(policy="none"),
    )
    try:
        if progress:
            progress("prefill", 0, llm.kv.n_layers + 1)
        llm.eval(prose.tokens(llm, n_tokens))
        mismatches = found = 0
        speedups: list[float] = []
        for layer in range(llm.kv.n_layers):
            if progress:
                progress(f"layer {layer}", layer + 1, llm.kv.n_layers + 1)
            keys = np.ascontiguousarray(llm.kv.keys(layer).transpose(1, 0, 2))
            counts = twins.twin_counts(keys, tau, WINDOW, n_threads=n_threads)
            expected = twins.twin_counts(keys, tau, WINDOW, backend="numpy", n_threads=n_threads)
            mismatches += int((counts != expected).sum())
            found += int((counts > 0).sum())
            if len(speedups) < TIMED_HEADS and layer % max(1, llm.kv.n_layers // TIMED_HEADS) == 0:
                speedups.append(_speedup(keys[0], tau, n_threads))
        n_heads, d = llm.kv.n_layers * llm.kv.n_head_kv, llm.kv.layers[0].head_dim_k
        name = llm.facts.name
    finally:
        llm.close()
    return {
        "model": name,
        "n_tokens": n_tokens,
        "n_heads": n_heads,
        "d": d,
        "tau": tau,
        "backend": twins.active_backend(),
        "mismatches": mismatches,
        "with_twins": found / (n_heads * n_tokens),
        "vs_numpy": statistics.median(speedups),
    }


def _speedup(keys: npt.NDArray[np.float32], tau: float, n_threads: int) -> float:
    def seconds(call: Callable[[], Any], times: int) -> float:
        spent = []
        for _ in range(times):
            began = time.perf_counter()
            call()
            spent.append(time.perf_counter() - began)
        return statistics.median(spent)

    ours = seconds(lambda: twins.twin_counts(keys, tau, WINDOW, n_threads=n_threads), 5)
    return seconds(lambda: numpy_reference(keys, tau), 2) / ours


def markdown(result: dict[str, Any]) -> str:
    """One line."""
    return (
        f"Keys of {result['model']}, {result['n_tokens']:,} tokens, {result['n_heads']} heads (d = {result['d']}), tau "
        f"{result['tau']}: {result['mismatches']} of {result['n_heads'] * result['n_tokens']:,} counts differ from the "
        f"definition; {100 * result['with_twins']:.0f} % of tokens have a twin; {result['vs_numpy']:.1f}x numpy."
    )
