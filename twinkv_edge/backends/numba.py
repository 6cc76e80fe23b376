"""The portable backend: the kernels in numba, parallel over rows, no n x n array.

Products in float32 are a filter: they are off by a proved bound at most (``docs/kernels.md``), and the few pairs within
it of a threshold are computed again as the definition says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from . import KeyBatch, threads
from .numpy import normalize

__all__ = ["best_twin", "twin_counts", "twin_rows", "unavailable"]

_ROWS = 32  # rows of a task
_LANES = 128  # columns of a panel: long enough for vectors, short enough for the first-level cache

_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(**options: Any) -> Callable[[_F], _F]:
    """``numba.njit`` with a cache on disk, and with types."""
    decorator: Callable[[_F], _F] = numba.njit(cache=True, nogil=True, **options)
    return decorator


def unavailable() -> str | None:
    return None


def error_bound(d: int) -> Any:
    """How far a float32 product of two normalized keys, summed in any order, can be from their similarity."""
    u = 2.0**-24
    return np.float32(((d + 16) * u / (1 - (d + 16) * u) + 4 * u) * 1.01)


@_compiled()
def _similarity(a: Any, b: Any) -> Any:
    total = 0.0
    for k in range(a.shape[0]):
        total += np.float64(a[k]) * np.float64(b[k])
    return np.float32(total)


@_compiled(inline="always", fastmath={"contract", "reassoc", "nsz"})
def _products(rows: Any, row: int, panel: Any, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
    """Products of rows row .. row + 3 with the 128 columns of a panel [d, 128]; d is a multiple of 4."""
    s0[:], s1[:], s2[:], s3[:] = 0, 0, 0, 0
    for k in range(0, panel.shape[0], 4):
        a0, a1, a2, a3 = rows[row, k], rows[row, k + 1], rows[row, k + 2], rows[row, k + 3]
        b0, b1, b2, b3 = rows[row + 1, k], rows[row + 1, k + 1], rows[row + 1, k + 2], rows[row + 1, k + 3]
        c0, c1, c2, c3 = rows[row + 2, k], rows[row + 2, k + 1], rows[row + 2, k + 2], rows[row + 2, k + 3]
        d0, d1, d2, d3 = rows[row + 3, k], rows[row + 3, k + 1], rows[row + 3, k + 2], rows[row + 3, k + 3]
        for c in range(_LANES):
            x0, x1, x2, x3 = panel[k, c], panel[k + 1, c], panel[k + 2, c], panel[k + 3, c]
            s0[c] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            s1[c] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            s2[c] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            s3[c] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@_compiled(inline="always")
def _count_row(s: Any, rows: Any, i: int, j0: int, begin: int, stop: int, tau: Any, bound: Any, counts: Any) -> None:
    """Adds the pairs of row i with columns j0 + begin .. j0 + stop to the counts of both."""
    count, unsure = 0, 0
    for c in range(begin, stop):
        above = s[c] > tau
        count += above
        counts[j0 + c] += above
        unsure += np.abs(s[c] - tau) <= bound
    if unsure > 0:
        for c in range(begin, stop):
            if np.abs(s[c] - tau) <= bound:
                change = np.int32(_similarity(rows[i], rows[j0 + c]) > tau) - np.int32(s[c] > tau)
                count += change
                counts[j0 + c] += change
    counts[i] += count


@_compiled(parallel=True)
def _count(rows: Any, panels: Any, n: int, first: Any, tau: Any, bound: Any, counts: Any) -> None:
    """counts [threads, n padded]; first[i]: the first column that row i is compared with."""
    tasks = (n + _ROWS - 1) // _ROWS
    for task in numba.prange(tasks):
        mine = counts[numba.get_thread_id()]
        s0, s1 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
        s2, s3 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
        row0 = task * _ROWS
        for panel in range(first[row0] // _LANES, panels.shape[0]):
            j0 = panel * _LANES
            stop = min(_LANES, n - j0)
            for row in range(row0, min(row0 + _ROWS, n), 4):
                _products(rows, row, panels[panel], s0, s1, s2, s3)
                _count_row(s0, rows, row, j0, max(0, first[row] - j0), stop, tau, bound, mine)
                _count_row(s1, rows, row + 1, j0, max(0, first[row + 1] - j0), stop, tau, bound, mine)
                _count_row(s2, rows, row + 2, j0, max(0, first[row + 2] - j0), stop, tau, bound, mine)
                _count_row(s3, rows, row + 3, j0, max(0, first[row + 3] - j0), stop, tau, bound, mine)


@_compiled(inline="always")
def _best_row(s: Any, a: Any, b: Any, i: int, j0: int, begin: int, stop: int, bound: Any, best: Any) -> None:
    """Raises best[i] to the largest similarity with columns j0 + begin .. j0 + stop."""
    most = np.float32(-2)
    for c in range(begin, stop):
        most = max(most, s[c])
    # the largest similarity is within twice the bound of the largest product
    if most + bound > best[i]:
        for c in range(begin, stop):
            if s[c] >= most - 2 * bound and s[c] + bound > best[i]:
                best[i] = max(best[i], _similarity(a[i], b[j0 + c]))


@_compiled(parallel=True)
def _best(a: Any, n: int, b: Any, panels: Any, n_columns: int, bands: Any, bound: Any, best: Any) -> None:
    """best [n padded]; bands [n padded, 2]: columns that a row is not compared with."""
    tasks = (n + _ROWS - 1) // _ROWS
    for task in numba.prange(tasks):
        s0, s1 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
        s2, s3 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
        row0 = task * _ROWS
        for panel in range(panels.shape[0]):
            j0 = panel * _LANES
            stop = min(_LANES, n_columns - j0)
            for row in range(row0, min(row0 + _ROWS, n), 4):
                _products(a, row, panels[panel], s0, s1, s2, s3)
                for r in range(4):
                    i = row + r
                    s = s0 if r == 0 else s1 if r == 1 else s2 if r == 2 else s3
                    _best_row(s, a, b, i, j0, 0, min(stop, bands[i, 0] - j0), bound, best)
                    _best_row(s, a, b, i, j0, max(0, bands[i, 1] - j0), stop, bound, best)


@_compiled(parallel=True)
def _mark(a: Any, b: Any, bands: Any, tau: Any, bound: Any, out: Any) -> None:
    """out [rows, columns]: similarity >= tau and not in the row's band."""
    for c in numba.prange(b.shape[0]):
        for r in range(a.shape[0]):
            product = np.float32(0)
            for k in range(a.shape[1]):
                product += a[r, k] * b[c, k]
            twin = product >= tau
            if np.abs(product - tau) <= bound:
                twin = _similarity(a[r], b[c]) >= tau
            out[r, c] = twin and not bands[r, 0] <= c < bands[r, 1]


def _padded(unit: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The same keys with zeros to a multiple of 4 dimensions and 4 more rows than a multiple of 4."""
    n, d = unit.shape
    out = np.zeros(((n + 7) // 4 * 4, (d + 3) // 4 * 4), np.float32)
    out[:n, :d] = unit
    return out


def _panels(unit: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Keys [n, d] as [panels, d padded, 128]."""
    n, d = unit.shape
    out = np.zeros(((n + _LANES - 1) // _LANES * _LANES, (d + 3) // 4 * 4), np.float32)
    out[:n, :d] = unit
    return np.ascontiguousarray(out.reshape(-1, _LANES, out.shape[1]).transpose(0, 2, 1))


def _bands(rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Columns within the window of each row, int64 [rows, 2]; columns ascend."""
    begin = np.searchsorted(columns, rows - window, side="left")
    return np.stack([begin, np.searchsorted(columns, rows + window, side="right")], axis=1)


def _head(batch: KeyBatch, head: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Keys that have a direction, normalized; which tokens they are; their positions."""
    unit, valid = normalize(batch.keys[head])
    tokens = np.flatnonzero(valid)
    return unit[tokens], tokens, batch.positions_of(head)[tokens].astype(np.int64)


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    bound = error_bound(batch.keys.shape[2])
    with _Threads(n_threads):
        for head in range(batch.n_heads):
            unit, tokens, position = _head(batch, head)
            n, rows = len(tokens), _padded(unit)
            first = np.full(len(rows), n)  # rows of padding meet no column
            first[:n] = np.searchsorted(position, position + window, side="right")
            counts = np.zeros((numba.get_num_threads(), len(rows)), np.int32)
            _count(rows, _panels(unit), n, first, np.float32(tau), bound, counts)
            out[head, tokens] = counts.sum(axis=0)[:n]
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    bound = error_bound(batch.keys.shape[2])
    with _Threads(n_threads):
        for head in range(batch.n_heads):
            unit, tokens, position = _head(batch, head)
            n, kept = len(tokens), np.flatnonzero(retained[head, tokens])
            rows, columns = _padded(unit), _padded(unit[kept])
            best = np.full(len(rows), -1.0, np.float32)
            bands = np.zeros((len(rows), 2), np.int64)
            bands[:n] = _bands(position, position[kept], window)
            _best(rows, n, columns, _panels(unit[kept]), len(kept), bands, bound, best)
            out[head, tokens] = best[:n]
    return out


def twin_rows(
    batch: KeyBatch,
    head: int,
    rows: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    tau: float,
    window: int,
    n_threads: int | None,
) -> npt.NDArray[np.bool_]:
    order = np.argsort(columns)
    unit, valid = normalize(batch.keys[head][np.concatenate([rows, columns[order]])])
    position = batch.positions_of(head).astype(np.int64)
    bands = _bands(position[rows], position[columns[order]], window)
    a, b = unit[: len(rows)], unit[len(rows) :]
    marked = np.empty((len(rows), len(columns)), np.bool_)
    with _Threads(n_threads):
        _mark(a, b, bands, np.float32(tau), error_bound(a.shape[1]), marked)
    marked &= valid[: len(rows), None] & valid[None, len(rows) :]
    out = np.empty_like(marked)
    out[:, order] = marked
    return out


class _Threads:
    """Sets numba's number of threads for a while; never more than it was started with."""

    def __init__(self, n_threads: int | None) -> None:
        self.wanted = min(threads(n_threads), numba.config.NUMBA_NUM_THREADS)

    def __enter__(self) -> None:
        self.before = numba.get_num_threads()
        numba.set_num_threads(self.wanted)

    def __exit__(self, *_: object) -> None:
        numba.set_num_threads(self.before)
