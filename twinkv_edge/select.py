"""From scores to retained sets: the protected regions, the budget, and the votes of the cell layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


def protected(positions: npt.NDArray[np.int32], n_tokens: int, n_sink: int, n_recent: int) -> BoolArray:
    """Sinks and recent tokens, by true position (TwinKV, section 3.2). positions int32 [..., n] -> bool [..., n]."""
    return (positions < n_sink) | (positions >= n_tokens - n_recent)


def top(scores: npt.NDArray[np.float32], keep: int | npt.NDArray[np.int32], always: BoolArray) -> BoolArray:
    """The `keep` highest-scoring tokens of each row, those of `always` first; ties go to the lower position.

    Args:
        scores: float32 [..., n].
        keep: Tokens kept per row, the same for all or int32 [...]; at least as many as the row of `always` holds.
        always: bool [..., n].

    Returns:
        bool [..., n] with exactly `keep` True per row (n where it is larger).
    """
    n = scores.shape[-1]
    ranked = np.where(always, np.inf, scores.astype(np.float64))
    order = np.argsort(-ranked, axis=-1, kind="stable")
    retained = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(retained, order, np.arange(n) < np.asarray(keep)[..., None], axis=-1)
    return retained


def ranks(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Each row's scores as ranks in [0, 1], so that rows of different scale can be added up."""
    order = np.argsort(scores, axis=-1, kind="stable")
    result = np.empty(scores.shape, dtype=np.float64)
    steps = np.broadcast_to(np.linspace(0.0, 1.0, scores.shape[-1]), scores.shape)
    np.put_along_axis(result, order, steps, axis=-1)
    return result


class Ballot:
    """One retained set for all layers and heads: the tokens that most heads would keep for themselves.

    Layers vote one after another, so only sums are held. Ties are broken by the mean rank over the heads.
    """

    def __init__(self, n: int) -> None:
        self._votes = np.zeros(n)
        self._ranks = np.zeros(n)
        self._heads = 0

    def add(self, retained: BoolArray, scores: npt.NDArray[np.float32]) -> None:
        """Votes of one layer: retained bool [H, n], scores float32 [H, n]."""
        self._votes += retained.sum(axis=0)
        self._ranks += ranks(scores).sum(axis=0)
        self._heads += retained.shape[0]

    def elect(self, keep: int, always: BoolArray) -> BoolArray:
        """The common set, bool [n]."""
        # a rank mean is below 1 vote, so it only breaks ties
        score = self._votes + self._ranks / (self._heads + 1)
        order = np.argsort(-np.where(always, np.inf, score), kind="stable")
        retained = np.zeros(score.shape, dtype=np.bool_)
        retained[order[:keep]] = True
        return retained


class RepairVotes:
    """The repair of one common set: orphans and donors by the share of (layer, head) pairs that see them as such.

    o_i is the share where i is an orphan, d_j the share where j is a donor. Orphans by o and donors by d, both
    descending, swap while o_i > 1 - d_j: the heads that gain outnumber those that lose.
    """

    def __init__(self, retained: BoolArray, always: BoolArray) -> None:
        self._retained = retained
        self._movable = retained & ~always
        self._orphans = np.zeros(retained.shape[0])
        self._donors = np.zeros(retained.shape[0])
        self._heads = 0

    def add(self, best: npt.NDArray[np.float32], tau: float, admissible: BoolArray) -> None:
        """Votes of one layer: best-twin similarities against the common set, float32 [H, n]."""
        limit = np.float32(tau)
        self._orphans += (~self._retained & (best < limit) & admissible).sum(axis=0)
        self._donors += (self._movable & (best >= limit)).sum(axis=0)
        self._heads += best.shape[0]

    def swap(self) -> tuple[BoolArray, int, int, int]:
        """The repaired set and the numbers of swaps, orphans and donors (tokens with at least one vote)."""
        o, d = self._orphans / self._heads, self._donors / self._heads
        orphans = np.argsort(-o, kind="stable")[: np.count_nonzero(o)]
        donors = np.argsort(-d, kind="stable")[: np.count_nonzero(d)]
        repaired = self._retained.copy()
        swaps = 0
        for i, j in zip(orphans, donors, strict=False):
            if o[i] <= 1 - d[j]:
                break
            repaired[i], repaired[j] = True, False
            swaps += 1
        return repaired, swaps, len(orphans), len(donors)
