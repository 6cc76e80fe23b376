"""Kernels of our own for NVIDIA GPUs (``native/twins/cuda``), where the library was built with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import KeyBatch, Ranking, RepairSettings, native

__all__ = ["best_twin", "repair", "twin_counts", "unavailable"]


def unavailable() -> str | None:
    reason = native.unavailable()
    if reason is None:
        reason = native.module().cuda_unavailable()
    return reason


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    keys, positions = native.arguments(batch)
    native.module().cuda_twin_counts(keys, positions, tau, window, out)
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    keys, positions = native.arguments(batch)
    native.module().cuda_best_twin(keys, positions, np.ascontiguousarray(retained).view(np.uint8), window, out)
    return out


def repair(
    batch: KeyBatch,
    retained: npt.NDArray[np.bool_],
    settings: RepairSettings,
    ranking: Ranking,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The similarities on the GPU, the swaps beside it (see :mod:`twinkv_edge.backends.native`)."""
    best = best_twin(batch, retained, settings.window, settings.n_threads)
    return native.repair(batch, retained, settings, ranking, best)
