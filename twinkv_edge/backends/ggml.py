"""The kernels as ggml graphs on a device of ggml: Metal, CUDA, Vulkan, CPU (``native/twins/device.cpp``).

The device is the first GPU that ggml has, else the CPU; the environment variable TWINKV_GGML_DEVICE names another, as
ggml names it ("Vulkan0", "CPU").
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from . import KeyBatch, Ranking, RepairSettings, native

__all__ = ["best_twin", "device", "repair", "twin_counts", "unavailable"]


def unavailable() -> str | None:
    reason = native.unavailable()
    if reason is not None:
        return reason
    known = native.module().devices()
    wanted = os.environ.get("TWINKV_GGML_DEVICE")
    if wanted is not None and wanted not in known:
        return f"ggml has no device {wanted!r} here, only {', '.join(known)}"
    return None if known else "ggml has no device here"


def device() -> str:
    """The name of the device that runs."""
    known: dict[str, bool] = native.module().devices()
    gpus = [name for name, is_gpu in known.items() if is_gpu]
    return os.environ.get("TWINKV_GGML_DEVICE") or next(iter(gpus or known))


def twin_counts(batch: KeyBatch, tau: float, window: int, n_threads: int | None) -> npt.NDArray[np.int32]:
    out = np.zeros((batch.n_heads, batch.n), np.int32)
    keys, positions = native.arguments(batch)
    native.module().device_twin_counts(device(), keys, positions, tau, window, n_threads or 0, out)
    return out


def best_twin(
    batch: KeyBatch, retained: npt.NDArray[np.bool_], window: int, n_threads: int | None
) -> npt.NDArray[np.float32]:
    out = np.full((batch.n_heads, batch.n), -1.0, np.float32)
    keys, positions = native.arguments(batch)
    mask = np.ascontiguousarray(retained).view(np.uint8)
    native.module().device_best_twin(device(), keys, positions, mask, window, n_threads or 0, out)
    return out


def repair(
    batch: KeyBatch,
    retained: npt.NDArray[np.bool_],
    settings: RepairSettings,
    ranking: Ranking,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The similarities on the device, the swaps beside it (see :mod:`twinkv_edge.backends.native`)."""
    best = best_twin(batch, retained, settings.window, settings.n_threads)
    return native.repair(batch, retained, settings, ranking, best)
