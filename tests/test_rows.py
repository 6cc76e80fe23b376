"""Rows of every cache type as float32, against gguf's own quantization code."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkv_edge._install import native
from twinkv_edge.errors import InputError, UnsupportedModelError
from twinkv_edge.models.ggml_types import CACHE_TYPES

ROUND_TRIP = [name for name in CACHE_TYPES if name != "iq4_nl"]  # gguf decodes iq4_nl, but does not encode it


@pytest.mark.parametrize("name", ROUND_TRIP)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_every_cache_type(name: str, n_threads: int) -> None:
    rows = np.random.default_rng(0).standard_normal((777, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType(CACHE_TYPES[name])
    packed = gguf.quants.quantize(rows, kind)
    out = np.empty_like(rows)
    stored = np.ascontiguousarray(packed).view(np.uint8).reshape(777, -1)
    native.rows_to_f32(int(kind), stored.reshape(-1), stored.shape[1], out, n_threads)
    np.testing.assert_allclose(out, gguf.quants.dequantize(packed, kind), rtol=1e-6, atol=1e-7)


def test_iq4_nl() -> None:
    kind = gguf.GGMLQuantizationType.IQ4_NL
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (50, 3 * 18), dtype=np.uint8)
    packed[:, 0::18], packed[:, 1::18] = 0x66, 0x2E  # a finite f16 scale at the head of every block
    out = np.empty((50, 96), dtype=np.float32)
    native.rows_to_f32(int(kind), packed.reshape(-1), packed.shape[1], out, 0)
    np.testing.assert_allclose(out, gguf.quants.dequantize(packed, kind), rtol=1e-6)


@given(n=st.integers(0, 5), padding=st.integers(0, 9), cut=st.integers(1, 4))
def test_strides_and_ends(n: int, padding: int, cut: int) -> None:
    values, stride = 32, 64 + padding
    raw = np.random.default_rng(n).integers(0, 256, max(0, (n - 1) * stride + 64), dtype=np.uint8)
    out = np.empty((n, values), dtype=np.float32)
    native.rows_to_f32(CACHE_TYPES["f16"], raw, stride, out, 0)
    for i in range(n):
        np.testing.assert_array_equal(out[i], raw[i * stride : i * stride + 64].view(np.float16).astype(np.float32))
    if n:
        with pytest.raises(InputError, match="past the end"):
            native.rows_to_f32(CACHE_TYPES["f16"], raw[:-cut], stride, out, 0)


def test_what_is_refused() -> None:
    out = np.empty((1, 33), dtype=np.float32)
    with pytest.raises(InputError, match="blocks"):
        native.rows_to_f32(CACHE_TYPES["q8_0"], np.zeros(68, dtype=np.uint8), 68, out, 0)
    with pytest.raises(UnsupportedModelError):
        native.rows_to_f32(4, np.zeros(68, dtype=np.uint8), 68, out, 0)  # a type that was removed from ggml
    assert not native.rows_supported(-1)
    assert not native.rows_supported(10_000)
