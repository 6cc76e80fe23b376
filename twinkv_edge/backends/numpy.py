"""The reference: the definition of similarity written down in numpy, in blocks of rows. Slow; for tests.

sim(i, j) is summed in double in the order of the dimensions and rounded to float32 once. Products of two
float32 values are exact in double, so every machine and backend gets the same bits (``docs/kernels.md``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from . import KeyBatch

__all__ = ["best_twin", "normalize", "similarity", "twin_counts", "twin_rows", "unavailable"]

_ROWS = 256  # rows at once: bounds scratch to 256 n values


def unavailable() -> str | None:
    return None


def normalize(keys: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Keys of length 1, float32 ``[..., n, d]``, and which of them have a direction, bool ``[..., n]``.

    A key whose norm is zero or not finite becomes zeros.
    """
    wide = keys.astype(np.float64)
    square = np.zeros(wide.shape[:-1])
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(wide.shape[-1]):
            square += wide[..., k] * wide[..., k]
        norm = np.sqrt(square)
        valid = np.isfinite(norm) & (norm > 0)
        unit = np.where(valid[..., None], wide, 0.0) / np.where(valid, norm, 1.0)[..., None]
    return unit.astype(np.float32), valid


def similarity(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Similarities of normalized keys a ``[r, d]`` and b ``[c, d]``, float32 ``[r, c]``."""
    total = np.zeros((len(a), len(b)))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for k in range(a.shape[1]):
        total += wide_a[:, k, None] * wide_b[None, :, k]
    return total.astype(np.float32)


def _blocks(
    batch: KeyBatch, head: int, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], window: int
) -> Iterator[tuple[slice, npt.NDArray[np.float32], npt.NDArray[np.bool_]]]:
    """Yields (slice of rows, sim float32, comparable bool) for blocks of rows."""
    unit, valid = normalize(batch.keys[head])
    position = batch.positions_of(head).astype(np.int64)
    for start in range(0, len(rows), _ROWS):
        block = rows[start : start + _ROWS]
        far = np.abs(position[block, None] - position[None, columns]) > window
        yield (
            slice(start, start + len(block)),
            similarity(unit[block], unit[columns]),
            far & valid[block, None] & valid[None, columns],
        )


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    everything = np.arange(batch.n)
    for head in range(batch.n_heads):
        for rows, sim, comparable in _blocks(batch, head, everything, everything, window):
            out[head, rows] = np.sum((sim > np.float32(tau)) & comparable, axis=1)
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    for head in range(batch.n_heads):
        kept = np.flatnonzero(retained[head])
        for rows, sim, comparable in _blocks(batch, head, np.arange(batch.n), kept, window):
            out[head, rows] = np.max(np.where(comparable, sim, np.float32(-1)), axis=1, initial=np.float32(-1))
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
    out = np.zeros((len(rows), len(columns)), np.bool_)
    for block, sim, comparable in _blocks(batch, head, rows, columns, window):
        out[block] = (sim >= np.float32(tau)) & comparable
    return out
