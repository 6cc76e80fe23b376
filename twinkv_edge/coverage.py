"""The repair by coverage, on top of any backend's ``best_twin``: the slow definition of ``native/twins/cover.cpp``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt

from .backends import KeyBatch, Ranking, RepairSettings
from .backends.numpy import normalize, similarity

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def repair_all(
    module: ModuleType, batch: KeyBatch, retained: BoolArray, s: RepairSettings, ranking: Ranking
) -> tuple[BoolArray, npt.NDArray[np.int64]]:
    """All heads: the new sets, bool ``[B, n]``, and swaps, orphans and donors, int64 ``[B, 3]``."""
    best = module.best_twin(batch, retained, s.window, s.n_threads)
    out, stats = retained.copy(), np.zeros((batch.n_heads, 3), np.int64)
    for head in range(batch.n_heads):
        stats[head] = _Head(batch, head, best[head], ranking, s).swap(out[head])
    return out, stats


class _Head:
    def __init__(self, batch: KeyBatch, head: int, best: FloatArray, ranking: Ranking, s: RepairSettings) -> None:
        self.unit, self.valid = normalize(batch.keys[head])
        self.guard = s.protected(batch.positions_of(head))
        self.position = batch.positions_of(head).astype(np.int64)
        self.worth = np.arange(batch.n, dtype=np.float32) if ranking.priority is None else ranking.priority[head]
        self.weight = np.ones(batch.n, np.float32) if ranking.weight is None else ranking.weight[head]
        self.best, self.s = best, s

    def swap(self, retained: BoolArray) -> tuple[int, int, int]:
        """Rewrites retained [n]; returns swaps, orphans and donors."""
        s = self.s
        outside = ~retained & self.valid
        donors = self._leaving(retained)
        if not outside.any() or not donors.size:
            return 0, 0, 0
        margin = np.float32(s.margin)
        orphans = np.count_nonzero(self.best[outside] + margin < self.best[donors].max())
        could_go = np.count_nonzero(self.best[donors] > self.best[outside].min() + margin)
        limit = math.floor(s.share * min(int(retained.sum()), int((~retained).sum())))
        given, stays = np.flatnonzero(retained), retained.copy()
        covered = self.best.copy()
        queue = iter(donors)
        swaps = 0
        while swaps < limit:
            lack = np.where(outside, (np.float32(1) - covered) * self.weight, np.float32(0))
            orphan = int(lack.argmax())
            donor = self._release(queue, covered[orphan] + margin, given, stays) if lack[orphan] > 0 else None
            if donor is None:
                break
            stays[donor] = retained[donor] = False
            retained[orphan] = True
            outside[orphan] = False
            rest = np.flatnonzero(outside)
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
