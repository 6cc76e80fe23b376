"""The repair by coverage, on top of any backend's ``best_twin``: the slow definition of ``native/twins/cover.cpp``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt

from .backends import KeyBatch, RepairSettings
from .backends.numpy import normalize, similarity

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def repair_all(
    module: ModuleType, batch: KeyBatch, retained: BoolArray, s: RepairSettings, priority: FloatArray | None
) -> tuple[BoolArray, npt.NDArray[np.int64]]:
    """All heads: the new sets, bool ``[B, n]``, and swaps, orphans and donors, int64 ``[B, 3]``."""
    best = module.best_twin(batch, retained, s.window, s.n_threads)
    out, stats = retained.copy(), np.zeros((batch.n_heads, 3), np.int64)
    for head in range(batch.n_heads):
        worth = np.arange(batch.n, dtype=np.float32) if priority is None else priority[head]
        stats[head] = _Head(batch, head, best[head], worth, s).swap(out[head])
    return out, stats


class _Head:
    def __init__(self, batch: KeyBatch, head: int, best: FloatArray, worth: FloatArray, s: RepairSettings) -> None:
        self.unit, self.valid = normalize(batch.keys[head])
        self.guard = s.protected(batch.positions_of(head))
        self.position = batch.positions_of(head).astype(np.int64)
        self.best, self.worth, self.s = best, worth, s

    def swap(self, retained: BoolArray) -> tuple[int, int, int]:
        """Rewrites retained [n]; returns swaps, orphans and donors."""
        s = self.s
        outside = ~retained & self.valid
        donors = self._leaving(retained)
        if not outside.any() or not donors.size:
            return 0, 0, 0
        orphans = np.count_nonzero(self.best[outside] < self.best[donors].max())
        could_go = np.count_nonzero(self.best[donors] > self.best[outside].min())
        limit = math.floor(s.share * int(retained.sum()))
        given, stays = np.flatnonzero(retained), retained.copy()
        covered = np.where(outside, self.best, np.float32(np.inf))
        queue = iter(donors)
        swaps = 0
        while swaps < limit:
            orphan = int(covered.argmin())
            if not np.isfinite(covered[orphan]):
                break
            donor = self._release(queue, covered[orphan], given, stays)
            if donor is None:
                break
            stays[donor] = retained[donor] = False
            retained[orphan] = True
            covered[orphan] = np.inf
            rest = np.flatnonzero(np.isfinite(covered))
            covered[rest] = np.maximum(covered[rest], self._similar(orphan, rest))
            swaps += 1
        return swaps, int(orphans), int(could_go)

    def _leaving(self, retained: BoolArray) -> npt.NDArray[np.intp]:
        """Tokens that may go, those first that are worth least."""
        tokens = np.flatnonzero(retained & self.valid & ~self.guard)
        worth = np.where(np.isnan(self.worth), -np.inf, self.worth)[tokens]
        return tokens[np.argsort(worth, kind="stable")]

    def _release(
        self, queue: Iterator[np.intp], covered: np.float32, given: npt.NDArray[np.intp], stays: BoolArray
    ) -> int | None:
        for token in queue:
            others = given[stays[given]]
            if self.best[token] > covered and (self._similar(int(token), others) > covered).any():
                return int(token)
        return None

    def _similar(self, token: int, others: npt.NDArray[np.intp]) -> FloatArray:
        """Similarities with other tokens, float32; -1 within the local window and for keys without direction."""
        far = np.abs(self.position[token] - self.position[others]) > self.s.window
        found: FloatArray = similarity(self.unit[[token]], self.unit[others])[0]
        found[~far | ~self.valid[others]] = -1
        return found
