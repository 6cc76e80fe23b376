"""Evicting by itself: during a bounded prefill, before a new turn, and in the middle of a long answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .compression import Compression
from .errors import InputError
from .kv_cache import KVCache
from .report import CompressionReport

Progress = Callable[[int, int, int], None]


class Conversation(Protocol):
    """What rolling needs of CompressedLlama."""

    n_tokens: int
    n_batch: int
    compression: Compression

    @property
    def n_ctx_train(self) -> int: ...
    @property
    def kv(self) -> KVCache: ...
    def compress(self, compression: Compression) -> CompressionReport: ...


def check_bounded(cfg: Compression, n_batch: int, cells: int) -> None:
    """Raises InputError when a bounded prefill by these settings cannot hold in a context of so many cells."""
    target = cfg.target_tokens or 0
    least = cfg.n_sink + cfg.n_recent + n_batch
    if target < least:
        raise InputError(
            f"target_tokens={target} is below sinks + recent + one batch ({cfg.n_sink} + {cfg.n_recent} + "
            f"{n_batch} = {least}): raise target_tokens, or lower n_batch or n_recent"
        )
    if target + n_batch > cells:
        raise InputError(
            f"target_tokens plus one batch ({target} + {n_batch}) do not fit {cells} cells: "
            "raise n_ctx, or lower target_tokens or n_batch"
        )


class Rolling:
    """Cuts what is evaluated into batches and evicts before those that would pass the limit.

    In a bounded prefill the limit is target_tokens plus one batch and holds for every batch. With trigger_tokens it
    holds where stopping is safe: before the first batch of a prompt (a new turn; the prompt itself is never cut), and
    before every token of an answer. The newest turn and the protected first tokens are kept, as far as the budget goes.
    """

    def __init__(self, llm: Conversation) -> None:
        self._llm = llm
        self.n_protected = 0
        self.reports: list[CompressionReport] = []
        self._turn_start = 0

    @property
    def _cfg(self) -> Compression:
        return self._llm.compression

    @property
    def bounds_the_cache(self) -> bool:
        """Whether tokens may go on past n_ctx cells, up to the length the model was trained for."""
        return self._cfg.prefill == "bounded" or self._cfg.trigger_tokens is not None

    def reset(self) -> None:
        self.n_protected = 0
        self.reports = []
        self._turn_start = 0

    def resume(self, n_protected: int) -> None:
        """A saved conversation was loaded: its first tokens are protected again, and a new turn is to come."""
        self.reset()
        self.n_protected, self._turn_start = n_protected, self._llm.n_tokens

    def batches(self, tokens: list[int]) -> Iterator[list[int]]:
        """Batches of at most n_batch tokens; by the time one is handed out, room was made for it.

        Raises:
            InputError: Settings that cannot hold for this context, or tokens past the trained length.
        """
        llm, size = self._llm, self._llm.n_batch
        if self.bounds_the_cache:
            self._check(len(tokens))
        elif len(tokens) <= llm.kv.n_cells_allocated - llm.kv.n_cells or not tokens:
            yield from (tokens[i : i + size] for i in range(0, len(tokens), size))
            return
        else:
            llm.kv.check_room(len(tokens))  # says what to do
        if len(tokens) > 1:
            self._turn_start = llm.n_tokens
        for i in range(0, len(tokens), size):
            batch = tokens[i : i + size]
            whole = len(batch) if self._cfg.prefill == "bounded" else len(tokens) - i
            if (i == 0 or self._cfg.prefill == "bounded") and llm.kv.n_cells + whole > self._limit():
                self._evict(whole)
            yield batch

    def protecting(self, cfg: Compression) -> Compression:
        """The settings with the protected first tokens among the sinks."""
        return cfg.with_(n_sink=max(cfg.n_sink, self.n_protected)) if self.n_protected > cfg.n_sink else cfg

    def _limit(self) -> int:
        cfg = self._cfg
        limit = self._llm.kv.n_cells_allocated
        if cfg.trigger_tokens is not None:
            limit = min(limit, cfg.trigger_tokens)
        if cfg.prefill == "bounded":
            limit = min(limit, (cfg.target_tokens or 0) + self._llm.n_batch)
        return limit

    def _check(self, n: int) -> None:
        llm, cfg = self._llm, self._cfg
        if llm.n_tokens + n > max(llm.n_ctx_train, llm.kv.n_cells_allocated):
            raise InputError(
                f"{llm.n_tokens + n} tokens go past the {llm.n_ctx_train} positions this model was trained for: "
                "shorten the document, or take a model with a longer context"
            )
        if cfg.prefill == "bounded":
            check_bounded(cfg, llm.n_batch, llm.kv.n_cells_allocated)

    def _evict(self, incoming: int) -> None:
        """Evicts to the budget, keeping the newest turn as far as it fits."""
        llm, cfg = self._llm, self.protecting(self._cfg)
        n = llm.kv.n_cells
        if cfg.target_tokens is not None and n <= cfg.target_tokens:
            return  # nothing to win; if there is no room either, check_room says so
        budget = cfg.with_(n_sink=0, n_recent=0).budget(n)
        turn = llm.n_tokens - self._turn_start if incoming == 1 else 0
        recent = min(max(cfg.n_recent, turn), max(0, budget - cfg.n_sink))
        self.reports.append(llm.compress(cfg.with_(n_recent=recent)))
