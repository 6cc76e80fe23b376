"""The C++ kernels (``native/twins``): the default."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._install import native as _native
from .._install import reason
from . import REPAIR_MODES, KeyBatch, Ranking, RepairSettings

__all__ = ["arguments", "best_twin", "invalid_keys", "module", "repair", "twin_counts", "unavailable"]


def unavailable() -> str | None:
    return reason or None


def _keys(batch: KeyBatch) -> Any:
    """Strides between heads and tokens are read as they are; only the values of a key must be contiguous."""
    keys = batch.keys
    contiguous = keys.shape[2] == 1 or keys.strides[2] == keys.itemsize
    if keys.size == 0 or not contiguous or min(keys.strides) < 0:
        return np.ascontiguousarray(keys)
    return keys


def _positions(batch: KeyBatch) -> Any:
    return None if batch.positions is None else np.ascontiguousarray(batch.positions)


def module() -> Any:
    """The extension itself, for backends that are part of it."""
    return _native


def arguments(batch: KeyBatch) -> tuple[Any, Any]:
    """Keys and positions as the extension takes them."""
    return _keys(batch), _positions(batch)


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    _native.twin_counts(_keys(batch), _positions(batch), tau, window, n_threads or 0, out)
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    mask = np.ascontiguousarray(retained).view(np.uint8)
    _native.best_twin(_keys(batch), _positions(batch), mask, window, n_threads or 0, out)
    return out


def invalid_keys(batch: KeyBatch, n_threads: int | None) -> npt.NDArray[np.bool_]:
    """Keys whose norm is zero or not finite, bool ``[B, n]``."""
    out = np.zeros((batch.n_heads, batch.n), np.uint8)
    _native.invalid_keys(_keys(batch), n_threads or 0, out)
    return out.view(np.bool_)


def repair(
    batch: KeyBatch,
    retained: npt.NDArray[np.bool_],
    settings: RepairSettings,
    ranking: Ranking,
    best: npt.NDArray[np.float32] | None = None,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The repaired sets, bool ``[B, n]``, and each head's swaps, orphans and donors, int64 ``[B, 3]``.

    best: float32 ``[B, n]`` as best_twin gives it, where it is known.
    """
    out = np.array(retained, np.bool_, order="C")
    stats = np.zeros((batch.n_heads, 3), np.int64)
    _native.repair(
        _keys(batch),
        _positions(batch),
        out.view(np.uint8),
        REPAIR_MODES.index(settings.mode),
        settings.tau,
        settings.window,
        settings.n_sink,
        settings.n_recent,
        settings.share,
        settings.margin,
        settings.n_threads or 0,
        *(None if a is None else np.ascontiguousarray(a) for a in (best, ranking.priority, ranking.weight)),
        stats,
    )
    return out, stats
