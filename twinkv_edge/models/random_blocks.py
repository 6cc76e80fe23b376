"""Random weights in the storage of ggml's types, made as blocks directly instead of being quantized.

A block of a quantized type is a scale and small integers: drawing the integers and fixing the scale gives
valid weights of a chosen standard deviation at the speed of the random generator. The integers are drawn
symmetric about zero, otherwise every row of a matrix would share an offset and the activations would grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .ggml_types import GGML_TYPES, GgmlType

Array = npt.NDArray[Any]
Generator = np.random.Generator

_CHUNK: Final = 1 << 24  # bytes of weights in memory at a time, about


def _nibbles(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """For each possible byte, the byte with both of its nibbles looked up in `values`."""
    both = np.arange(256)
    pairs: npt.NDArray[np.uint8] = values[both & 15] | (values[both >> 4] << 4)
    return pairs


# 0 stands for -8 in q4_0 and has no counterpart: it becomes 8, which stands for 0
_SYMMETRIC = _nibbles(np.where(np.arange(16) == 0, 8, np.arange(16)).astype(np.uint8))
_Q4_STD: Final = math.sqrt(2 * sum(k * k for k in range(1, 8)) / 16)


def _f16(x: float, n: int) -> Array:
    """n copies of x as the two bytes of a half, `[n, 2]`."""
    return np.full((n, 1), x, dtype="<f2").view(np.uint8)


def _q4_0(rng: Generator, n: int, std: float) -> Array:
    integers = _SYMMETRIC[np.frombuffer(rng.bytes(16 * n), np.uint8)].reshape(n, 16)
    return np.concatenate([_f16(std / _Q4_STD, n), integers], axis=1)


def _q4_1(rng: Generator, n: int, std: float) -> Array:
    scale = std / math.sqrt((16 * 16 - 1) / 12)
    integers = np.frombuffer(rng.bytes(16 * n), np.uint8).reshape(n, 16)
    # minimum -7.5 scale: the sixteen values lie symmetric about zero
    return np.concatenate([_f16(scale, n), _f16(-7.5 * scale, n), integers], axis=1)


def _q8_0(rng: Generator, n: int, std: float) -> Array:
    integers = rng.integers(-127, 128, (n, 32), dtype=np.int8).view(np.uint8)
    return np.concatenate([_f16(std / math.sqrt((255 * 255 - 1) / 12), n), integers], axis=1)


def _q6_k(rng: Generator, n: int, std: float) -> Array:
    """256 integers of 6 bits from -32 to 31 (low and high bits apart), 16 signed scales of 8 bits, a half."""
    bits = np.frombuffer(rng.bytes(192 * n), np.uint8).reshape(n, 192)
    # the signs of the scales alternate: so the half by which -32..31 is off centre cancels within a block
    scales = np.tile(np.array([64, -64] * 8, np.int8).view(np.uint8), (n, 1))
    scale = std / (64 * math.sqrt((64 * 64 - 1) / 12))
    return np.concatenate([bits, scales, _f16(scale, n)], axis=1)


def _normal(rng: Generator, n: int, std: float) -> npt.NDArray[np.float32]:
    weights: npt.NDArray[np.float32] = rng.standard_normal(n, dtype=np.float32) * np.float32(std)
    return weights


def _f32(rng: Generator, n: int, std: float) -> Array:
    return np.asarray(_normal(rng, n, std), "<f4").view(np.uint8)


def _half(rng: Generator, n: int, std: float) -> Array:
    return np.asarray(_normal(rng, n, std), "<f2").view(np.uint8)


def _bf16(rng: Generator, n: int, std: float) -> Array:
    """The upper half of a float's bits (truncated: random weights need no rounding)."""
    return np.ascontiguousarray(np.asarray(_normal(rng, n, std), "<f4").view("<u2")[1::2]).view(np.uint8)


_MAKERS: Final[dict[str, Callable[[Generator, int, float], Array]]] = {
    "f32": _f32,
    "f16": _half,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q6_K": _q6_k,
}
#: what `random_model(quant=...)` takes; q6_K is only for the output matrix
QUANTS: Final = tuple(name for name in _MAKERS if name != "q6_K")


def ggml_type(name: str) -> tuple[int, GgmlType]:
    """ggml's number and sizes of the weight type `name`. Raises InputError if it can't be made here."""
    for number, kind in GGML_TYPES.items():
        if kind.name == name and name in _MAKERS:
            return number, kind
    raise InputError(f"quant {name!r} is not one of {', '.join(QUANTS)}")


def random_chunks(kind: GgmlType, n_elements: int, std: float, rng: Generator) -> Iterator[Array]:
    """Bytes (uint8, 1-D) of `n_elements` random weights of standard deviation `std`, a piece at a time."""
    blocks, at_once = n_elements // kind.block, _CHUNK // kind.size
    for first in range(0, blocks, at_once):
        yield _MAKERS[kind.name](rng, min(at_once, blocks - first), std).reshape(-1)
