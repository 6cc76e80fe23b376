"""One configuration of `bench memory`, in a process of its own: reads a job as JSON on stdin, prints a result as JSON.

Memory is what the kernel says of this process; a job of kind "weights" measures the part that is not the cache.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp

import twinkv_edge as tk
from twinkv_edge.bench.clock import median
from twinkv_edge.models.ggml_types import CACHE_TYPES

LIFE_AFTER = 512  # tokens decoded after the prompt


def process_bytes(key: str) -> int | None:
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM the peak since the last `reset_peak`."""
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            for line in f:
                if line.startswith(key + ":"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None


def reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as f:
            f.write("5")
    except OSError:
        return False
    return True


def prompt(llm: llama_cpp.Llama, n: int) -> list[int]:
    """n tokens of varied but repeatable text; ids directly where the model has no tokenizer to speak of."""
    top = max(2, llm.n_vocab() - 1)
    return [(7919 * (i % 4093) + i // 97) % top + 1 for i in range(n)]


def open_model(job: dict[str, Any]) -> llama_cpp.Llama:
    types = {k: CACHE_TYPES[job[k]] for k in ("type_k", "type_v")}
    common = {"n_ctx": job["n_ctx"], "n_batch": job["n_batch"], "flash_attn": True, "verbose": False, **types}
    common |= {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    if job["kind"] == "twinkv_edge":
        return tk.CompressedLlama(job["model"], compression=tk.Compression(**job["compression"]), **common)
    return llama_cpp.Llama(job["model"], **common)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    llm = open_model(job)
    ours = isinstance(llm, tk.CompressedLlama)
    life: list[dict[str, Any]] = []

    def note(stage: str) -> None:
        fp = llm.footprint() if ours else None
        life.append(
            {
                "stage": stage,
                "tokens": llm.n_tokens,
                "cells": fp.cells if fp else llm.n_tokens,
                "process": process_bytes("VmRSS"),
                "cache": fp.bytes_resident if fp else None,
            }
        )

    note("created")
    tokens = prompt(llm, job["n_tokens"])
    reset_peak()
    began = time.perf_counter()
    evicting = 0.0
    for i in range(0, len(tokens), job["n_batch"]):
        llm.eval(tokens[i : i + job["n_batch"]])
        note("prefill")
    prefill = time.perf_counter() - began
    if ours:
        evicting = sum(r.total_seconds for r in llm.compressions)
    peak_prefill = process_bytes("VmHWM")
    reset_peak()
    report = None
    if ours and job["compression"].get("prefill", "full") == "full" and job["compression"]["policy"] != "none":
        report = llm.compress()
        evicting += report.total_seconds
        note("evicted")
    peak_eviction = process_bytes("VmHWM")
    spent = []
    for i in range(job["n_after"]):
        start = time.perf_counter()
        llm.eval([tokens[i % len(tokens)]])
        spent.append(1e3 * (time.perf_counter() - start))
        if i % 64 == 63:
            note("decode")
    note("end")
    return {
        "life": life,
        "peak_prefill": peak_prefill,
        "peak_eviction": peak_eviction,
        "prefill_s": prefill - (evicting if report is None else 0.0),
        "evict_s": evicting,
        "moved_s": report.seconds["evict"] if report else None,
        "decode_ms": median(spent),
        "allocated": llm.footprint().bytes_allocated if ours else None,
    }


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """What the process takes without a cache to speak of: weights, libraries, a minimal context."""
    llm = llama_cpp.Llama(job["model"], n_ctx=256, n_batch=256, flash_attn=True, verbose=False)
    llm.eval(prompt(llm, 1))
    return {"process": process_bytes("VmRSS")}


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"weights": weights}

if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(JOBS.get(task["kind"], measure)(task)))
