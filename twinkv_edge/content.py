"""What a token holds for attention, as one vector: whether two tokens' vectors are alike says whether one can stand in
for the other. It is what the repair by coverage compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import views
from ._install import native
from .compression import Compression
from .errors import UnsupportedModelError
from .policies.base import FloatArray, LayerView


@dataclass(frozen=True)
class Balance:
    """How the repair by coverage weighs keys and values (docs/repair.md: what was tried).

    Attributes:
        value_scale: Of values beside keys, both at a mean square of 1.
        margin: By which what goes must be covered better than what comes in.
    """

    value_scale: float
    margin: float


BALANCE = Balance(0.35, 0.06)
# Keys that the model normalizes have less in common and differ twice as much: values keep up, and so does the margin.
BALANCE_QK_NORM = Balance(0.7, 0.12)


def balance(layer: LayerView) -> Balance:
    """The balance for the model that the layer is of."""
    return BALANCE_QK_NORM if layer.has_qk_norm else BALANCE


def content(
    keys: FloatArray, values: FloatArray, value_scale: float = BALANCE.value_scale, n_threads: int | None = None
) -> tuple[npt.NDArray[np.float16], FloatArray]:
    """Keys and values side by side, and how much each value matters.

    Weights of attention add up to 1, so what all values of a head have in common is delivered whatever is kept: values
    count as far as they differ from the head's mean. Keys and values are brought to one scale, head by head.

    Args:
        keys: float32 [H, n, d], finite; with RoPE taken back, for what they say to count and not where they stand.
        values: float32 [H, n, d_v], finite.
        value_scale: Of values beside keys.
        n_threads: None means one per core. It never changes the result.

    Returns:
        float16 [H, n, d + d_v], to be compared by direction; and float32 [H, n], the norms of the values less their
        mean: what an error in the weight of that token costs.

    Raises:
        InputError: Keys or values have no dimensions, or value_scale is negative or not finite.
        ValueError: They are not of the same heads and tokens.
    """
    keys, values = (np.ascontiguousarray(rows, dtype=np.float32) for rows in (keys, values))
    vectors = np.empty((*keys.shape[:2], keys.shape[2] + values.shape[2]), dtype=np.float16)
    weights = np.empty(keys.shape[:2], dtype=np.float32)
    native.content(keys, values, value_scale, n_threads or 0, vectors.view(np.uint16), weights)
    return vectors, weights


def compared(cfg: Compression, part: views.Part) -> tuple[npt.NDArray[Any], FloatArray | None]:
    """What the repair compares, [H, n, ...], and what each token's lack of cover costs, float32 [H, n].

    The paper's rules compare keys, coverage keys and values.
    """
    if cfg.repair_mode != "coverage":
        return _keys(cfg, part.view), None
    if cfg.repair_space not in part.contents:
        layer = part.view
        vectors, weight = content(_keys(cfg, layer), layer.values, balance(layer).value_scale, layer.n_threads)
        if not np.isfinite(weight).all():
            views.check_values(layer)
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
