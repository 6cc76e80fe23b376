"""What one eviction gives back: memory of the cache, memory of the process, and speed of decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .. import pipeline
from ..compression import Compression
from ..errors import InputError
from . import clock, prose

if TYPE_CHECKING:
    from ..llama import CompressedLlama

Progress = Callable[[int], None]


@dataclass(frozen=True)
class EvictionResult:
    """What was measured, in bytes, milliseconds and seconds.

    Attributes:
        n_before, n_after: Cells per head.
        bytes_evicted: Bytes of the evicted cells.
        cache_before, cache_after: Bytes of the cache tensors that are in RAM.
        process_before, process_after: Bytes of the process that are in RAM; None where the system does not say.
        decode_ms_before, decode_ms_after: Every timed decode of one token.
        n_threads: The same before and after.
        seconds: Prefill, and the stages of the compression.
    """

    n_before: int
    n_after: int
    bytes_evicted: int
    cache_before: int
    cache_after: int
    process_before: int | None
    process_after: int | None
    decode_ms_before: list[float]
    decode_ms_after: list[float]
    n_threads: int
    seconds: dict[str, float]
    swaps: int
    policy: str
    repair: str
    backend: str

    @property
    def cache_returned(self) -> float:
        """Share of the evicted bytes by which the cache's memory fell."""
        return (self.cache_before - self.cache_after) / self.bytes_evicted

    @property
    def process_returned(self) -> float | None:
        """Share of the evicted bytes by which the process's memory fell."""
        if self.process_before is None or self.process_after is None:
            return None
        return (self.process_before - self.process_after) / self.bytes_evicted

    @property
    def speedup(self) -> float:
        """Median decode time before, over that after."""
        before, after = clock.median(self.decode_ms_before), clock.median(self.decode_ms_after)
        return before / after if before and after else float("nan")

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "cache_returned": self.cache_returned,
            "process_returned": self.process_returned,
            "decode_ms_median_before": clock.median(self.decode_ms_before),
            "decode_ms_median_after": clock.median(self.decode_ms_after),
            "speedup": self.speedup,
        }


def measure(
    llm: CompressedLlama, n_tokens: int, settings: Compression, timed: int = 16, progress: Progress = lambda done: None
) -> EvictionResult:
    """Fills the cache with text, chooses what to keep, times decoding, evicts, times again.

    Args:
        llm: Made with these settings, so that it captures what the policy needs. Any content of its cache is dropped.
        n_tokens: Tokens of text.
        settings: How to evict.
        timed: Tokens to decode for each median; they are taken back.
        progress: Called with the number of tokens read so far.

    Raises:
        InputError: The text and the timed tokens do not fit, or the settings evict nothing.
    """
    if n_tokens + timed + 1 > llm.kv.n_cells_allocated:
        raise InputError(
            f"{n_tokens} tokens and {timed + 1} more to time do not fit into {llm.kv.n_cells_allocated} cells"
        )
    if settings.budget(n_tokens) >= n_tokens:
        raise InputError(f"these settings keep all of {n_tokens} tokens: there is nothing to measure")
    llm.reset()
    text = prose.tokens(llm, n_tokens)
    began = time.perf_counter()
    for start in range(0, n_tokens, llm.n_batch):
        llm.eval(text[start : start + llm.n_batch])
        progress(llm.n_tokens)
    seconds = {"prefill": time.perf_counter() - began}
    plan = pipeline.make_plan(llm.kv, settings, llm.tau)  # first: timing pushes queries out of the captured window
    ms_before = clock.decode_ms(llm, timed)
    cache_before, process_before = llm.footprint().bytes_resident, clock.process_resident_bytes()
    report = pipeline.carry_out(llm.kv, plan, settings, llm.tau)
    cache_after, process_after = llm.footprint().bytes_resident, clock.process_resident_bytes()
    return EvictionResult(
        n_before=report.n_before,
        n_after=report.n_after,
        bytes_evicted=report.bytes_before - report.bytes_after,
        cache_before=cache_before,
        cache_after=cache_after,
        process_before=process_before,
        process_after=process_after,
        decode_ms_before=ms_before,
        decode_ms_after=clock.decode_ms(llm, timed),
        n_threads=llm.n_threads,
        seconds={**seconds, **report.seconds},
        swaps=report.swaps,
        policy=report.policy,
        repair=report.repair,
        backend=report.backend,
    )
