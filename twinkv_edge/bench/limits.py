"""The bounds the cache is held to, each measured in one process: what `bench memory` prints under its table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..compression import Compression
from ..llama import CompressedLlama
from .clock import decode_ms
from .memory_child import process_bytes, prompt, reset_peak

PAGE = 4096


@dataclass(frozen=True)
class Limit:
    """A figure and the bound it must not pass.

    Attributes:
        what: What was measured.
        got: The figure; a ratio unless `unit` says otherwise.
        reach: The bound: got <= reach.
        detail: The numbers behind it.
    """

    what: str
    got: float
    reach: float
    unit: str = "x"
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.got <= self.reach

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@contextmanager
def opened(model: str | Path, **kwargs: Any) -> Iterator[CompressedLlama]:
    llm = CompressedLlama(str(model), **kwargs)
    try:
        yield llm
    finally:
        llm.close()


def context_creation(model: str | Path, threads: int) -> Limit:
    """A large n_ctx costs nothing until it is used."""
    with opened(model, n_ctx=131072, n_threads=threads) as llm:
        fp = llm.footprint()
    share = fp.bytes_resident / fp.bytes_allocated
    detail = f"{fp.bytes_resident / 2**20:.1f} of {fp.bytes_allocated / 2**20:.0f} MB"
    return Limit("resident share of the cache after creation, n_ctx=131072", share, 0.02, detail=detail)


def resident_after_eviction(model: str | Path, threads: int, n: int, keep: int) -> list[Limit]:
    """What stays in memory, for cache types with and without quantization."""
    limits = []
    for name, number in (("f16", 1), ("q8_0", 8), ("q4_0", 2)):
        with opened(model, n_ctx=n + 64, n_threads=threads, type_k=number, type_v=number) as llm:
            llm.eval(prompt(llm, n))
            llm.compress(policy="streaming_llm", repair="none", target_tokens=keep)
            fp = llm.footprint()
            allowed = 1.05 * fp.bytes_used + 2 * llm.kv.n_layers * PAGE
        detail = f"{keep} cells: {fp.bytes_used / 2**20:.2f} MB used, {fp.bytes_resident / 2**20:.2f} MB resident"
        limits.append(
            Limit(f"resident after eviction, {name}", fp.bytes_resident / allowed, 1.0, "of the bound", detail)
        )
    return limits


def bounded_peak(model: str | Path, threads: int, n: int, target: int, n_batch: int) -> Limit:
    """The largest cache of a bounded prefill."""
    cfg = Compression(policy="knorm", repair="paper", target_tokens=target, prefill="bounded")
    peak = 0
    cells = target + 4 * n_batch  # far fewer than tokens
    with opened(
        model, n_ctx=cells, n_threads=threads, n_threads_batch=threads, n_batch=n_batch, compression=cfg
    ) as llm:
        cell = llm.footprint().bytes_allocated / llm.kv.n_cells_allocated

        def watch(done: int, total: int, cells: int) -> None:
            nonlocal peak
            peak = max(peak, llm.footprint().bytes_resident)

        llm.eval(prompt(llm, n), progress=watch)
    most = peak / cell
    detail = f"{n:,} tokens, {most:.0f} cells at most"
    return Limit(f"peak cache of bounded prefill to {target} + {n_batch}", most / (target + n_batch), 1.1, "x", detail)


def eviction(model: str | Path, threads: int, n: int, keep: int, repeats: int = 5) -> list[Limit]:
    """Time and extra memory of moving the kept rows, against one memcpy of the kept bytes."""
    spent, peaks = [], []
    with opened(model, n_ctx=n + 64, n_threads=threads, n_threads_batch=threads) as llm:
        llm.eval(prompt(llm, n))
        plan = np.random.default_rng(0).random((llm.kv.n_layers, llm.kv.n_head_kv, n)).argsort(axis=-1) < keep
        state = llm.save_state()
        for _ in range(repeats):
            llm.load_state(state)
            before = process_bytes("VmRSS") or 0
            exact = reset_peak()
            report = llm.kv.evict(plan)
            spent.append(1e3 * (report.seconds["evict"] + report.seconds["release"]))
            peaks.append(max(0, (process_bytes("VmHWM") or 0) - before) if exact else 0)
        kept = report.bytes_after
    source, target = np.ones(kept, dtype=np.uint8), np.zeros(kept, dtype=np.uint8)
    copies = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        copies.append(1e3 * (time.perf_counter() - start))
    ms, copy = statistics.median(spent), statistics.median(copies)
    what = f"{n} -> {keep}"
    return [
        Limit(f"eviction {what}, moving rows and pages", ms, 60, "ms", f"{ms / copy:.1f} x one memcpy ({copy:.1f} ms)"),
        Limit(
            f"extra peak during eviction {what}",
            statistics.median(peaks) / kept,
            1.1,
            "x the bytes kept",
            f"{kept} kept",
        ),
    ]


def decode_after_eviction(model: str | Path, threads: int, n: int, keep: int) -> Limit:
    """Decoding on an evicted cache against a fresh context that holds as many tokens; measured in turns."""
    with (
        opened(model, n_ctx=n + 64, n_threads=threads, n_threads_batch=threads) as evicted,
        opened(model, n_ctx=keep + 64, n_threads=threads, n_threads_batch=threads) as fresh,
    ):
        evicted.eval(prompt(evicted, n))
        evicted.compress(policy="streaming_llm", repair="none", target_tokens=keep)
        fresh.eval(prompt(fresh, keep))
        turns = [(statistics.median(decode_ms(evicted, 16)), statistics.median(decode_ms(fresh, 16))) for _ in range(7)]
    ratio = statistics.median(a / b for a, b in turns)
    detail = (
        f"{statistics.median(a for a, _ in turns):.2f} against {statistics.median(b for _, b in turns):.2f} ms/token"
    )
    return Limit(f"decode at {keep} cells, evicted against fresh", ratio, 1.05, detail=detail)


def soak(model: str | Path, threads: int, n: int) -> list[Limit]:
    """A rolling conversation: memory and speed of the last tenth against the third."""
    cfg = Compression(policy="knorm", repair="none", target_tokens=512, trigger_tokens=768)
    memory, spent = [], []
    with opened(model, n_ctx=1024, n_threads=threads, n_threads_batch=threads, compression=cfg) as llm:
        tokens = prompt(llm, n)
        llm.eval(tokens[:256])
        for i in range(256, n):
            start = time.perf_counter()
            llm.eval([tokens[i]])
            spent.append(time.perf_counter() - start)
            if i % 64 == 0:
                memory.append(process_bytes("VmRSS") or 0)
    tenth_m, tenth_t = len(memory) // 10, len(spent) // 10
    growth = max(memory[-tenth_m:]) / max(memory[2 * tenth_m : 4 * tenth_m]) - 1
    slower = statistics.median(spent[-tenth_t:]) / statistics.median(spent[2 * tenth_t : 3 * tenth_t])
    return [
        Limit(f"memory growth over {n} rolling tokens", growth, 0.01, "", f"{max(memory) / 2**20:.0f} MB at most"),
        Limit("decode at the end of it against its beginning", slower, 1.1),
    ]


LONG_LIKE, LONG_LAYERS, LONG_TRAINED = "smollm2-135m", 4, 40960


def long_model() -> Path:
    """A model for lengths past what the embedded one was trained for: its shape, fewer layers, random weights."""
    return models.random_model(LONG_LIKE, LONG_LAYERS, n_ctx_train=LONG_TRAINED)


def run(
    model: str | Path,
    *,
    threads: int,
    n: int = 6144,
    keep: int = 1024,
    long: int = 32768,
    soak_tokens: int = 20000,
    progress: Callable[[str], None] | None = None,
) -> list[Limit]:
    """All bounds, on `model`; those of `long` and of `soak_tokens` tokens on `long_model()` where `model` was trained
    for fewer.
    """
    trained = models.facts(model).n_ctx_train
    longer = long_model() if max(long, soak_tokens) > trained else model
    steps: list[tuple[str, Callable[[], Limit | list[Limit]]]] = [
        ("context creation", lambda: context_creation(model, threads)),
        ("resident after eviction", lambda: resident_after_eviction(model, threads, 2048, 512)),
        ("bounded prefill", lambda: bounded_peak(longer, threads, long, keep, 512)),
        ("eviction", lambda: eviction(model, threads, n, keep)),
        ("decode after eviction", lambda: decode_after_eviction(model, threads, n, keep)),
        ("rolling soak", lambda: soak(longer, threads, soak_tokens)),
    ]
    limits: list[Limit] = []
    for name, step in steps:
        if progress:
            progress(name)
        got = step()
        limits += got if isinstance(got, list) else [got]
    return limits


def markdown(limits: list[Limit]) -> str:
    """The bounds as a table, as Markdown."""
    lines = ["| bound | measured | reach | holds | |", "|---|---:|---:|---|---|"]
    for x in limits:
        unit = f" {x.unit}" if x.unit else ""
        lines.append(f"| {x.what} | {x.got:.3g}{unit} | <= {x.reach:g} | {'yes' if x.holds else 'no'} | {x.detail} |")
    return "\n".join(lines)
