"""Loading a saved session against reading its document again, in one run and on the same context."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from ..compression import Compression
from ..errors import InputError
from ..session import Session
from . import clock

if TYPE_CHECKING:
    from ..llama import CompressedLlama

Progress = Callable[[int], None]


def measure(
    llm: CompressedLlama,
    folder: Path | None,
    *,
    n_tokens: int,
    settings: Compression,
    repeats: int = 5,
    prefills: int = 3,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """Reads random tokens, compresses and saves their cache, and loads it again and again; then reads it again.

    Every load is followed by one decode, whose logits must be those that followed the compression. Before every load
    the system is asked to forget the file's pages ("cold"); where it cannot be asked, only "warm" ones are timed.

    Args:
        llm: Any content of its cache is dropped.
        folder: Where the file goes; None: the system's temporary folder.
        n_tokens: Tokens of text.
        repeats, prefills: Runs of each; every one is in the result.
        progress: Called with the number of tokens read so far, over all prefills.

    Raises:
        InputError: The tokens do not fit.
    """
    if n_tokens + 1 > llm.kv.n_cells_allocated:
        raise InputError(
            f"{n_tokens} tokens and one more do not fit into {llm.kv.n_cells_allocated} cells: give --n-ctx"
        )
    # which tokens does not matter for the time, and random models have no vocabulary to make some of text
    text = np.random.default_rng(0).integers(1, llm.n_vocab(), n_tokens).tolist()
    prefill_s = []
    for run in range(prefills):
        llm.reset()
        began = time.perf_counter()
        llm.eval(text, lambda done, total, cells, run=run: progress(run * n_tokens + done))  # type: ignore[misc]
        llama_cpp.llama_synchronize(llm._ctx.ctx)
        prefill_s.append(time.perf_counter() - began)
    report = llm.compress(settings)
    cold: list[float] = []
    warm: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = Path(inside) / "bench.twinkv"
        began = time.perf_counter()
        saved = Session.save(llm, path)
        save_s = time.perf_counter() - began
        expected = _decode(llm, text[0])
        worst = 0.0
        for times, forget in ((cold, True), (warm, False)):
            for _ in range(repeats):
                if forget and not _forget(path):
                    break
                began = time.perf_counter()
                Session.load(llm, path)
                times.append(time.perf_counter() - began)
                worst = max(worst, float(np.abs(_decode(llm, text[0]) - expected).max()))
    prefill, loaded, from_disk = clock.median(prefill_s), clock.median(warm), clock.median(cold)
    return {
        "model": llm.facts.name,
        "n_tokens": n_tokens,
        "n_cells": saved.n_cells,
        "bytes": saved.n_bytes,
        "policy": report.policy,
        "threads": llm.n_threads,
        "prefill_s": prefill_s,
        "save_s": save_s,
        "load_cold_s": cold,
        "load_warm_s": warm,
        "prefill_median_s": prefill,
        "load_cold_median_s": from_disk,
        "load_warm_median_s": loaded,
        "speedup": prefill / (from_disk or loaded or float("nan")) if prefill else None,
        "logits_max_difference": worst,
    }


def _decode(llm: CompressedLlama, token: int) -> Any:
    """Logits after one more token."""
    llm.eval([token])
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm._ctx.ctx), (llm.n_vocab(),)).copy()


def _forget(path: Path) -> bool:
    """Asks the system to drop the file's pages from its cache; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def markdown(found: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [("prefill again", found["prefill_median_s"], len(found["prefill_s"]))]
    for name, key in (("load, from disk", "load_cold"), ("load, file in memory", "load_warm")):
        if found[f"{key}_median_s"] is not None:
            rows.append((name, found[f"{key}_median_s"], len(found[f"{key}_s"])))
    mb = found["bytes"] / (1 << 20)
    lines = [
        f"{found['model']}: {found['n_tokens']:,} tokens in {found['n_cells']:,} cells ({found['policy']}), "
        f"{mb:,.1f} MB, {found['threads']} threads; saved in {found['save_s']:.2f} s",
        "",
        "| | median, s | runs | times as fast |",
        "|---|---:|---:|---:|",
    ]
    prefill = found["prefill_median_s"]
    lines += [f"| {name} | {seconds:.3f} | {runs} | {prefill / seconds:,.1f} |" for name, seconds, runs in rows]
    return "\n".join([*lines, "", f"largest difference of a logit after loading: {found['logits_max_difference']:g}"])
