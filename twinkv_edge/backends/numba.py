"""The portable backend: the same kernels compiled by numba, parallel over tokens, no n x n array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from . import KeyBatch, threads
from .numpy import normalize

__all__ = ["best_twin", "twin_counts", "twin_rows", "unavailable"]

_BLOCK = 256  # columns at once: their sums stay in the first-level cache


_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(**options: Any) -> Callable[[_F], _F]:
    """``numba.njit`` with a cache on disk, and with types."""
    decorator: Callable[[_F], _F] = numba.njit(cache=True, **options)
    return decorator


def unavailable() -> str | None:
    return None


@_compiled(inline="always")
def _similarities(row: Any, columns: Any, start: int, stop: int, out: Any) -> None:
    """out[: stop - start]: similarities of a key with columns start..stop of ``columns`` [d, c]."""
    for c in range(stop - start):
        out[c] = 0.0
    for k in range(row.shape[0]):
        x = np.float64(row[k])
        for c in range(stop - start):
            out[c] += x * np.float64(columns[k, start + c])


@_compiled(parallel=True, nogil=True)
def _counts(unit: Any, columns: Any, valid: Any, position: Any, tau: Any, window: int, out: Any) -> None:
    n = unit.shape[0]
    for i in numba.prange(n):
        sums = np.empty(_BLOCK)
        count = 0
        for start in range(0, n, _BLOCK):
            stop = min(n, start + _BLOCK)
            _similarities(unit[i], columns, start, stop, sums)
            for j in range(start, stop):
                if abs(position[i] - position[j]) > window and valid[j] and np.float32(sums[j - start]) > tau:
                    count += 1
        out[i] = count if valid[i] else 0


@_compiled(parallel=True, nogil=True)
def _best(unit: Any, valid: Any, position: Any, columns: Any, column_position: Any, window: int, out: Any) -> None:
    for i in numba.prange(unit.shape[0]):
        sums = np.empty(_BLOCK)
        best = np.float32(-1)
        for start in range(0, columns.shape[1], _BLOCK):
            stop = min(columns.shape[1], start + _BLOCK)
            _similarities(unit[i], columns, start, stop, sums)
            for j in range(start, stop):
                if abs(position[i] - column_position[j]) > window:
                    best = max(best, np.float32(sums[j - start]))
        out[i] = best if valid[i] else np.float32(-1)


def _head(batch: KeyBatch, head: int) -> tuple[Any, Any, Any]:
    unit, valid = normalize(batch.keys[head])
    return unit, valid, batch.positions_of(head).astype(np.int64)


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    with _Threads(n_threads):
        for head in range(batch.n_heads):
            unit, valid, position = _head(batch, head)
            columns = np.ascontiguousarray(unit.T)
            _counts(unit, columns, valid, position, np.float32(tau), window, out[head])
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    with _Threads(n_threads):
        for head in range(batch.n_heads):
            unit, valid, position = _head(batch, head)
            kept = np.flatnonzero(retained[head] & valid)
            columns = np.ascontiguousarray(unit[kept].T)
            _best(unit, valid, position, columns, position[kept], window, out[head])
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
    from .numpy import twin_rows as reference

    return reference(batch, head, rows, columns, tau, window, n_threads)


class _Threads:
    """Sets numba's number of threads for a while; never more than it was started with."""

    def __init__(self, n_threads: int | None) -> None:
        self.wanted = min(threads(n_threads), numba.config.NUMBA_NUM_THREADS)

    def __enter__(self) -> None:
        self.before = numba.get_num_threads()
        numba.set_num_threads(self.wanted)

    def __exit__(self, *_: object) -> None:
        numba.set_num_threads(self.before)
