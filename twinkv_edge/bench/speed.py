"""What every policy costs, as shares of a prefill: watching the queries, scoring, repairing, evicting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..compression import Compression
from ..llama import CompressedLlama
from .chosen import usable
from .clock import decode_ms
from .memory_child import process_bytes, prompt, reset_peak


def run(
    model: str | Path,
    *,
    n_tokens: int = 4096,
    ratio: float = 0.5,
    repair: str = "paper",
    names: Sequence[str] | None = None,
    threads: int = 2,
    repeats: int = 3,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Prefills with each policy in turn, and with none in between: shares of one run, medians over `repeats`.

    Returns:
        {"model", "n_tokens", "ratio", "repair", "prefill_s", "rows": [...]}; a row holds the policy's seconds (watch:
        the prefill's growth by capturing, score, repair, evict), the same as shares of the plain prefill, decode
        ms/token afterwards, and extra_bytes: how much higher the process's peak was than in the plain prefill before,
        from the first token to the end of the eviction. decode_ms of the result is that of the full cache.
    """
    plain: list[float] = []
    before: list[float] = []
    with_none = Compression(policy="none")
    llm = CompressedLlama(
        str(model), n_ctx=n_tokens + 64, n_threads=threads, n_threads_batch=threads, compression=with_none
    )
    try:
        chosen, left_out = usable(llm, names)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
        total = repeats * (len(chosen) + 1)
        tokens = prompt(llm, n_tokens)
        for turn in range(repeats):
            for number, name in enumerate(["none", *chosen]):
                if progress:
                    progress(name, turn * (len(chosen) + 1) + number, total)
                llm.compression = Compression(policy=name, ratio=ratio, repair=repair)  # type: ignore[arg-type]
                llm.reset()
                exact = reset_peak()
                start = time.perf_counter()
                llm.eval(tokens)
                prefill = time.perf_counter() - start
                if name == "none":
                    plain.append(prefill)
                    plain_peak = process_bytes("VmHWM") or 0
                    # only here: tokens decoded for the clock and taken back leave a gap in what was captured
                    before.append(statistics.median(decode_ms(llm, 8)))
                    continue
                seconds = llm.compress().seconds
                extra = (process_bytes("VmHWM") or 0) - plain_peak if exact else float("nan")
                after = statistics.median(decode_ms(llm, 8))
                found[name].append({"prefill": prefill, **seconds, "decode": after, "extra": extra})
    finally:
        llm.close()
    base = statistics.median(plain)
    rows = [_row(name, runs, plain, base) for name, runs in found.items()]
    return {
        "model": Path(model).name,
        "n_tokens": n_tokens,
        "ratio": ratio,
        "repair": repair,
        "threads": threads,
        "prefill_s": base,
        "decode_ms": statistics.median(before),
        "rows": rows,
        "left_out": left_out,
    }


def _row(name: str, runs: list[dict[str, float]], plain: list[float], base: float) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    # each prefill against the plain one of the same turn: what the machine does meanwhile falls out
    watch = statistics.median(run["prefill"] / p for run, p in zip(runs, plain, strict=True)) - 1
    seconds = {key: median(key) for key in ("score", "repair", "evict", "release")}
    return {
        "policy": name,
        "seconds": {"watch": watch * base, **seconds},
        "share": {"watch": watch, **{key: value / base for key, value in seconds.items()}},
        "decode_ms": median("decode"),
        "extra_bytes": median("extra"),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, as Markdown: percent of a plain prefill."""
    lines = [
        f"{result['model']}, {result['n_tokens']} tokens, ratio {result['ratio']}, {result['repair']} repair, "
        f"{result['threads']} threads; plain prefill {result['prefill_s']:.1f} s, "
        f"decoding on the full cache {result['decode_ms']:.1f} ms/token.",
        "",
        "| policy | watch % | score % | repair % | evict % | decode ms/token | extra peak MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in result["rows"]:
        shares = [f"{100 * r['share'][k]:.1f}" for k in ("watch", "score", "repair", "evict")]
        lines.append(
            f"| {' | '.join([r['policy'], *shares])} | {r['decode_ms']:.1f} | {r['extra_bytes'] / 2**20:.1f} |"
        )
    lines += ["", *(f"Without {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip()
