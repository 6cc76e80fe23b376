"""Clocks and gauges that the measurements share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import llama_cpp

if TYPE_CHECKING:
    from ..llama import CompressedLlama


def rewind(llm: CompressedLlama, n_tokens: int) -> None:
    """Takes tokens back until n_tokens are left; the next answer decodes at least one before it samples.

    Raises:
        CacheStateError: That would reach into the compressed part.
    """
    llm.kv.rollback(n_tokens)
    llm.n_tokens = n_tokens
    llm._requires_eval = True  # the logits at hand belong to a token that was taken back


def decode_ms(llm: CompressedLlama, n: int, *, budget_s: float = float("inf")) -> list[float]:
    """Milliseconds of single-token decodes at the end of the conversation, which is left as it was.

    A first decode, which sets up llama.cpp's graph, is not counted. Which token is decoded does not change the cost:
    it is the last one, again and again.

    Args:
        llm: Holds at least one token, and n + 1 free cells.
        n: Decodes to time.
        budget_s: Once this many seconds are spent, four are enough.
    """
    start = llm.n_tokens
    token = int(llm.input_ids[start - 1])
    spent: list[float] = []
    try:
        for i in range(n + 1):
            began = time.perf_counter()
            llm.eval([token])
            llama_cpp.llama_synchronize(llm._ctx.ctx)
            if i:
                spent.append(1e3 * (time.perf_counter() - began))
            if len(spent) >= 4 and sum(spent) > 1e3 * budget_s:
                break
    finally:
        rewind(llm, start)
    return spent


def median(values: Iterable[float]) -> float | None:
    """The median, or None of nothing."""
    values = list(values)
    return statistics.median(values) if values else None


def process_resident_bytes() -> int | None:
    """Memory of this process that is in RAM (RSS), as the kernel counts it now; None where it does not say."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as f:  # exact; statm lags behind by a batch per thread
            for line in f:
                if line.startswith("Rss:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None
