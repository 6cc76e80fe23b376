"""Where the twin kernels run: one module per backend, the same functions and bit for bit the same results.

A backend module has

    unavailable() -> str | None                                     why it cannot run here, or None
    twin_counts(batch, tau, window, n_threads) -> int32 [B, n]       Eq. 2
    best_twin(batch, retained, window, n_threads) -> float32 [B, n]  Eq. 4; retained: bool [B, n]

and one of

    repair(batch, retained, settings, ranking)
        -> bool [B, n], int64 [B, 3]                                 the new sets; swaps, orphans and donors
    twin_rows(batch, head, rows, columns, tau, window, n_threads)
        -> bool [rows, columns]                                      sim >= tau: what a repair here is made of

Arguments are checked before they get here (:mod:`twinkv_edge.twins`); ``tau`` is a float32 value.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["REPAIR_MODES", "KeyBatch", "Positions", "RepairSettings", "threads"]

Positions = npt.NDArray[np.int32]
REPAIR_MODES = ("paper", "consistent", "coverage")  # as numbered in twinkv.h


@dataclass(frozen=True)
class KeyBatch:
    """Keys of B heads, float32 or float16 ``[B, n, d]``, and the tokens' true positions.

    ``positions`` is int32 ``[1 or B, n]``, or None for 0..n-1.
    """

    keys: npt.NDArray[np.float32] | npt.NDArray[np.float16]
    positions: Positions | None

    @property
    def n_heads(self) -> int:
        return int(self.keys.shape[0])

    @property
    def n(self) -> int:
        return int(self.keys.shape[1])

    def positions_of(self, head: int) -> Positions:
        """int32 ``[n]``."""
        if self.positions is None:
            return np.arange(self.n, dtype=np.int32)
        row: Positions = self.positions[head if len(self.positions) > 1 else 0]
        return row


@dataclass(frozen=True)
class RepairSettings:
    """What a repair goes by, checked (:func:`twinkv_edge.repair` says what they mean)."""

    mode: str
    tau: float
    window: int
    n_sink: int
    n_recent: int
    share: float
    margin: float
    n_threads: int | None

    def protected(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Sinks and recent tokens, which are never evicted: bool ``[n]`` for int32 ``[n]``."""
        p = positions.astype(np.int64)
        guard: npt.NDArray[np.bool_] = (p < self.n_sink) | (p > p.max(initial=0) - self.n_recent)
        return guard


@dataclass(frozen=True)
class Ranking:
    """What coverage ranks a head's tokens by, float32 ``[B, n]`` each (:func:`twinkv_edge.repair` says how)."""

    priority: npt.NDArray[np.float32] | None = None
    weight: npt.NDArray[np.float32] | None = None


def threads(n_threads: int | None) -> int:
    """A number of threads; None means one per core."""
    return n_threads if n_threads is not None else os.cpu_count() or 1
