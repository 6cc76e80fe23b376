"""The repair pass: audits what a policy keeps and swaps redundant tokens for lost ones (TwinKV, section 3.4).

An *orphan* is a token the policy drops although nothing similar survives (``best_twin < tau``); a *donor* is
one it keeps although a copy survives (``best_twin >= tau``), sinks and recent tokens excepted. Each swap
evicts a donor and admits an orphan, so the budget never changes.

``mode="paper"`` judges every swap against the set the policy chose, orphans by ascending and donors by
descending ``best_twin``. Two mutual twins can then both be evicted, and orphans that are twins of each other
all be admitted.
``mode="consistent"`` judges again after every swap: orphans most severe first, none whose twin was just
admitted; donors oldest first, none that is the last surviving twin of itself or of a token evicted before.
After it, every token the repair evicted still has a twin in the retained set.
``mode="coverage"`` has no threshold. A token is *covered* as well as the retained token most like it is like it. The
token outside whose lack of cover, times its weight, is largest comes in, judged against those that came in before it
too; for it goes, of the tokens that others of the set, still there, cover better by ``margin``, the one that the policy
thinks worth least. It is meant for what :func:`twinkv_edge.content.content` makes of keys and values (`docs/repair.md`
says why, and what was tried).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import coverage
from .backends import REPAIR_MODES, KeyBatch, Ranking, RepairSettings
from .errors import InputError
from .twins import (
    active_backend,
    backend_module,
    check_retained,
    check_tau,
    check_threads,
    check_window,
    key_batch,
)

__all__ = ["MODES", "Repair", "repair"]

MODES = REPAIR_MODES
SHARE = 0.3  # of what is kept or evicted, whichever is less, that coverage swaps at most (docs/repair.md)
MARGIN = 0.06  # by which what goes must be covered better than what comes in; `content.BALANCE` has it for models


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        retained: bool ``[..., n]``, as many tokens per head as before.
        n_swaps: swaps made, int64 ``[...]`` (an int for a single head), as the next two.
        n_orphans: orphans in the set given; for "coverage", tokens that some donor is covered better than.
        n_donors: donors in the set given; for "coverage", those covered better than some token outside.
        backend: the backend that ran.
    """

    retained: npt.NDArray[np.bool_]
    n_swaps: Any
    n_orphans: Any
    n_donors: Any
    backend: str = ""


def repair(
    keys: npt.ArrayLike,
    retained: npt.ArrayLike,
    *,
    tau: float | None = None,
    local_window: int = 32,
    n_sink: int = 4,
    n_recent: int = 64,
    mode: str = "paper",
    positions: npt.ArrayLike | None = None,
    priority: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
    share: float = SHARE,
    margin: float = MARGIN,
    backend: str = "auto",
    n_threads: int | None = None,
) -> Repair:
    """Swaps redundant donors for orphans within the budget of each head.

    Args:
        keys: float32 or float16 ``[..., n, d]``. A key whose norm is zero or not finite is never admitted.
        retained: bool ``[..., n]``; it is not changed.
        tau: similarity from which on a token counts as covered, in (-1, 1]; "coverage" needs none.
        local_window: positions within which tokens are not compared.
        n_sink: tokens at positions below it are never evicted.
        n_recent: nor are those in the last ``n_recent`` positions.
        mode: "paper", "consistent" or "coverage" (see the module).
        positions: true positions, int32 ``[n]`` or ``[..., n]``, strictly ascending; None means 0..n-1.
        priority: for "coverage", what retained tokens are worth, float32 ``[..., n]``: the policy's scores. Low ones go
            first, NaN lowest. None: the older a token, the sooner it goes.
        weight: for "coverage", what it costs that a token is not covered, float32 ``[..., n]``, finite and not
            negative. None: all cost the same.
        share: for "coverage", the largest part of a head's budget, or of what it evicted where that is less, that is
            swapped, in [0, 1].
        margin: for "coverage", by how much better what goes must be covered than what comes in for it, in [0, 2].
        backend, n_threads: as for :func:`twinkv_edge.twin_counts`.

    Raises:
        InputError: shapes, dtypes or numbers are not as above.
    """
    batch, shape = key_batch(keys, positions)
    mask = check_retained(retained, shape).reshape(batch.n_heads, batch.n)
    if mode not in MODES:
        raise InputError(f"no repair mode {mode!r}: choose one of {', '.join(MODES)}")
    if mode != "coverage" and tau is None:
        raise InputError(f"mode {mode!r} needs tau, the similarity from which on tokens are twins (0.9, say)")
    settings = RepairSettings(
        mode,
        check_tau(1.0 if tau is None else tau),
        check_window(local_window),
        check_window(n_sink, "n_sink"),
        check_window(n_recent, "n_recent"),
        _check_part(share, "share", "the part of the budget that may be swapped", 1),
        _check_part(margin, "margin", "how much better covered what goes must be", 2),
        check_threads(n_threads),
    )
    ranking = _ranking(priority, weight, shape) if mode == "coverage" else Ranking()
    module = backend_module(backend)
    if hasattr(module, "repair"):
        out, stats = module.repair(batch, mask, settings, ranking)
    elif mode == "coverage":
        out, stats = coverage.repair_all(module, batch, mask, settings, ranking)
    else:
        out, stats = _repair_all(module, batch, mask, settings)
    swaps, orphans, donors = (stats[:, k].reshape(shape[:-1]) if shape[:-1] else int(stats[0, k]) for k in range(3))
    return Repair(out.reshape(shape), swaps, orphans, donors, active_backend(backend))


def _check_part(value: float, name: str, meaning: str, most: int) -> float:
    if not (isinstance(value, int | float) and 0 <= value <= most):
        raise InputError(f"{name} is {value!r}: give {meaning}, from 0 to {most}")
    return float(value)


def _ranking(priority: npt.ArrayLike | None, weight: npt.ArrayLike | None, shape: tuple[int, ...]) -> Ranking:
    worth, cost = _per_token(priority, "priority", shape), _per_token(weight, "weight", shape)
    if cost is not None and not (np.isfinite(cost) & (cost >= 0)).all():
        raise InputError("weight must be finite and not negative for every token")
    return Ranking(worth, cost)


def _per_token(given: npt.ArrayLike | None, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
    """float32 [B, n], or None for nothing."""
    if given is None:
        return None
    values = np.asarray(given)
    if values.shape != shape or values.dtype.kind not in "fiu":
        raise InputError(
            f"{name} must be numbers of the shape {list(shape)}, one per token, not {values.dtype} {list(values.shape)}"
        )
    return np.ascontiguousarray(values, dtype=np.float32).reshape(math.prod(shape[:-1]), shape[-1])


def _repair_all(
    module: ModuleType, batch: KeyBatch, retained: npt.NDArray[np.bool_], s: RepairSettings
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The repair on top of a backend's ``best_twin`` and ``twin_rows``, head by head."""
    best = module.best_twin(batch, retained, s.window, s.n_threads)
    out = retained.copy()
    stats = np.zeros((batch.n_heads, 3), np.int64)
    for head in range(batch.n_heads):
        valid = np.isfinite(batch.keys[head]).all(axis=-1) & (batch.keys[head] != 0).any(axis=-1)
        covered = best[head] >= np.float32(s.tau)
        orphans = np.flatnonzero(~retained[head] & ~covered & valid)
        orphans = orphans[np.argsort(best[head, orphans], kind="stable")]
        donors = np.flatnonzero(retained[head] & covered & ~s.protected(batch.positions_of(head)))
        donors = donors[np.argsort(-best[head, donors], kind="stable")]
        stats[head] = 0, len(orphans), len(donors)
        if s.mode == "consistent":
            orphans = _admit(module, batch, head, orphans, len(donors), s)
            donors = _release(module, batch, head, np.sort(donors), retained[head], len(orphans), s)
        m = min(len(orphans), len(donors))
        out[head, donors[:m]] = False
        out[head, orphans[:m]] = True
        stats[head, 0] = m
    return out, stats


def _admit(
    module: ModuleType,
    batch: KeyBatch,
    head: int,
    by_severity: npt.NDArray[np.intp],
    limit: int,
    s: RepairSettings,
) -> npt.NDArray[np.intp]:
    """Orphans that come in, most severe first, each unless a twin of its own came in before it."""
    admitted: list[np.intp] = []
    covered = np.zeros(len(by_severity), np.bool_)
    for rank, token in enumerate(by_severity):
        if covered[rank]:
            continue
        if len(admitted) == limit:
            break
        admitted.append(token)
        rest = by_severity[rank:]
        row = by_severity[rank : rank + 1]
        covered[rank:] |= module.twin_rows(batch, head, row, rest, s.tau, s.window, s.n_threads)[0]
    return np.array(admitted, np.intp)


def _release(
    module: ModuleType,
    batch: KeyBatch,
    head: int,
    donors: npt.NDArray[np.intp],
    retained: npt.NDArray[np.bool_],
    limit: int,
    s: RepairSettings,
) -> npt.NDArray[np.intp]:
    """Donors that go, oldest first: while a twin stays, of theirs and of every token that went before."""
    released: list[np.intp] = []
    kept = np.flatnonzero(retained)
    stays = np.ones(len(kept), np.bool_)
    twins_staying = np.zeros(len(kept), np.int64)  # of those that went
    for token in donors:
        if len(released) == limit:
            break
        twin = module.twin_rows(batch, head, np.array([token]), kept, s.tau, s.window, s.n_threads)[0]
        gone_twins = twin & ~stays
        if not (twin & stays).any() or (twins_staying[gone_twins] < 2).any():
            continue
        twins_staying[gone_twins] -= 1
        index = np.searchsorted(kept, token)
        stays[index] = False
        twins_staying[index] = np.count_nonzero(twin & stays)
        released.append(token)
    return np.array(released, np.intp)
