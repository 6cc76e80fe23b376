"""What a token holds for attention, as one vector: whether two tokens' vectors are alike says whether one can stand in
for the other. It is what the repair by coverage compares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import views
from ._install import native
from .compression import Compression
from .errors import UnsupportedModelError
from .policies.base import FloatArray, LayerView

VALUE_SCALE = 0.35  # of values beside keys, both at a mean square of 1 (docs/repair.md: what was tried)


def content(
    keys: FloatArray, values: FloatArray, n_threads: int | None = None
) -> tuple[npt.NDArray[np.float16], FloatArray]:
    """Keys and values side by side, and how much each value matters.

    Weights of attention add up to 1, so what all values of a head have in common is delivered whatever is kept: values
    count as far as they differ from the head's mean. Keys and values are brought to one scale, head by head.

    Args:
        keys: float32 [H, n, d], finite; with RoPE taken back, for what they say to count and not where they stand.
        values: float32 [H, n, d_v], finite.
        n_threads: None means one per core. It never changes the result.

    Returns:
        float16 [H, n, d + d_v], to be compared by direction; and float32 [H, n], the norms of the values less their
        mean: what an error in the weight of that token costs.

    Raises:
        InputError: Keys or values have no dimensions.
        ValueError: They are not of the same heads and tokens.
    """
    keys, values = (np.ascontiguousarray(rows, dtype=np.float32) for rows in (keys, values))
    vectors = np.empty((*keys.shape[:2], keys.shape[2] + values.shape[2]), dtype=np.float16)
    weights = np.empty(keys.shape[:2], dtype=np.float32)
    native.content(keys, values, VALUE_SCALE, n_threads or 0, vectors.view(np.uint16), weights)
    return vectors, weights


def compared(cfg: Compression, part: views.Part) -> tuple[npt.NDArray[Any], FloatArray | None]:
    """What the repair compares, [H, n, ...], and what each token's lack of cover costs, float32 [H, n].

    The paper's rules compare keys, coverage keys and values.
    """
    if cfg.repair_mode != "coverage":
        return _keys(cfg, part.view), None
    if cfg.repair_space not in part.contents:
        vectors, weight = content(_keys(cfg, part.view), part.view.values, part.view.n_threads)
        if not np.isfinite(weight).all():
            views.check_values(part.view)
        part.contents[cfg.repair_space] = vectors, weight
    return part.contents[cfg.repair_space]


def _keys(cfg: Compression, layer: LayerView) -> FloatArray:
    """The keys that the repair compares, float32 [H, n, d]: as they are where their rotation cannot be taken back."""
    if cfg.repair_space == cfg.key_space:
        return layer.compared_keys
    try:
        return layer.unrotated_keys
    except UnsupportedModelError as e:
        layer.note(f"keys are compared with their rotation: {e}")
        return layer.keys
