"""In which space keys are compared: as cached, with RoPE taken back, or by the norms of their rotary pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UnsupportedModelError

HALF_SPLIT = 2  # GGML_ROPE_TYPE_NEOX: pair p is (p, p + n_dims/2); otherwise (2p, 2p+1)


@dataclass(frozen=True)
class Rotation:
    """How a layer's cached keys were rotated, as its graph showed.

    Attributes:
        rope: ggml's rotary parameters: n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor,
            beta_fast, beta_slow, freq_factors (empty, or [n_dims / 2] for Llama-3 and LongRoPE).
        hadamard: Size of the Hadamard blocks a quantized K cache is multiplied by after RoPE; 0: none.
    """

    rope: dict[str, Any]
    hadamard: int


NO_ROTATION = Rotation({"n_dims": 0, "mode": 0, "freq_factors": []}, 0)


def unrotated(
    rows: npt.NDArray[np.float32], positions: npt.NDArray[np.int32], rotation: Rotation, n_threads: int = 0
) -> npt.NDArray[np.float32]:
    """Keys or queries as they were before RoPE (and before the Hadamard product): rows float32 [n, H, d],
    positions int32 [n, H] -> float32 [n, H, d]. Without rotary dimensions only the Hadamard product is undone.
    n_threads: 0 means one per core.

    Raises:
        UnsupportedModelError: A rotary mode other than interleaved or half-split pairs (M-RoPE, vision).
    """
    out = np.array(rows, dtype=np.float32, order="K", copy=True)  # heads or tokens first, as they came
    if out.shape[-1] > 1 and out.strides[-1] != out.itemsize:
        out = np.ascontiguousarray(out)
    rope = rotation.rope
    from ._install import native  # here, so that policies can be listed without loading llama.cpp

    where = np.ascontiguousarray(positions, dtype=np.int32)
    native.unrotate(rope, list(rope["freq_factors"]), rotation.hadamard, out, where, n_threads)
    return out


def pair_norms(rows: npt.NDArray[np.float32], rotation: Rotation) -> npt.NDArray[np.float32]:
    """Norms of the rotary pairs, float32 [n, H, d] -> [n, H, n_dims/2 + (d - n_dims)]; unrotated dimensions stay.

    A rotation of a pair by any angle leaves its norm alone, so the result does not depend on positions nor on the
    rotary schedule (TwinKV, section 3.2 on LongRoPE).
    """
    n_dims = rotation.rope["n_dims"]
    if n_dims == 0:
        raise UnsupportedModelError("key_space='pair_norm' needs rotary embeddings, and this layer has none")
    if rotation.hadamard:
        # the Hadamard product mixes the pairs: take it back, without touching positions
        plain = dict(rotation.rope, n_dims=0, freq_factors=[])
        rows = unrotated(rows, np.zeros(rows.shape[:2], dtype=np.int32), Rotation(plain, rotation.hadamard))
    rotary, rest = rows[..., :n_dims], rows[..., n_dims:]
    if rotation.rope["mode"] == HALF_SPLIT:
        a, b = rotary[..., : n_dims // 2], rotary[..., n_dims // 2 :]
    else:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
    return np.concatenate([np.hypot(a, b), rest], axis=-1).astype(np.float32)


def mean_rotation(rotation: Rotation, first: int, n: int, d: int) -> npt.NDArray[np.float64]:
    """What queries at positions first .. first + n - 1 are multiplied by on their way into attention, on average:
    float64 [d, d], the mean of the RoPE matrices (Expected Attention, Eq. 6), in the space of the cached keys.

    Raises:
        UnsupportedModelError: As `unrotated`.
    """
    n_dims = rotation.rope["n_dims"]
    matrix = np.eye(d)
    if n_dims:
        cosines, sines = np.empty((2, n_dims // 2))
        from ._install import native

        native.mean_rotation(rotation.rope, list(rotation.rope["freq_factors"]), first, n, cosines, sines)
        pairs = np.arange(n_dims // 2)
        a, b = (pairs, pairs + n_dims // 2) if rotation.rope["mode"] == HALF_SPLIT else (2 * pairs, 2 * pairs + 1)
        matrix[a, a] = matrix[b, b] = cosines
        matrix[b, a] = sines
        matrix[a, b] = -sines
    return hadamard(rotation.hadamard, d) @ matrix if rotation.hadamard else matrix


def hadamard(size: int, d: int) -> npt.NDArray[np.float64]:
    """The orthonormal matrix that queries and keys of a quantized cache are multiplied by: float64 [d, d], Hadamard
    blocks of `size` (a power of two that divides d) on its diagonal. It is symmetric and its own inverse."""
    block = np.ones((1, 1))
    while block.shape[0] < size:
        block = np.block([[block, block], [block, -block]])
    return np.asarray(np.kron(np.eye(d // size), block) / np.sqrt(size))
