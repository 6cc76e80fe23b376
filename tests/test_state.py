"""The sequence state is read strictly: whatever is not as expected is refused, and nothing ever crashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkv_edge as tk
from twinkv_edge._install import native


@pytest.fixture(scope="module")
def states(qwen3_tiny: str) -> list[np.ndarray]:
    """Small real states: V by rows and transposed, plain and quantized."""
    found = []
    for kwargs in ({}, {"flash_attn": False}, {"type_k": 8, "type_v": 8}):
        llm = tk.CompressedLlama(qwen3_tiny, n_ctx=256, n_threads=1, **kwargs)
        llm.eval(list(range(1, 8)))
        found.append(llm.kv.sequence_state())
        llm.close()
    return found


def test_real_states(states: list[np.ndarray]) -> None:
    for state, transposed in zip(states, (False, True, False), strict=True):
        info = native.state_inspect(state)
        expected = {"n_layer": 4, "n_cells": 7, "pos_min": 0, "pos_max": 6, "v_transposed": transposed, "n_sections": 1}
        assert info == expected


def inspect(blob: np.ndarray) -> bool:
    try:
        native.state_inspect(blob)
    except tk.TwinKVError:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_states(states: list[np.ndarray], data: st.DataObject) -> None:
    blob = data.draw(st.sampled_from(states)).copy()
    kind = data.draw(st.sampled_from(["flip", "cut", "splice", "word"]))
    at = data.draw(st.integers(0, min(400, blob.size - 1)) | st.integers(0, blob.size - 1))
    if kind == "flip":
        blob[at] ^= 1 << data.draw(st.integers(0, 7))
        inspect(blob)
    elif kind == "word":
        value = data.draw(st.sampled_from([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1]))
        blob[at : at + 4] = np.frombuffer(value.to_bytes(4, "little"), dtype=np.uint8)[: blob.size - at]
        inspect(blob)
    elif kind == "cut":
        # a cut can only pass where nothing but a whole state is left
        assert not inspect(blob[:at]) or at == blob.size
    else:
        length = data.draw(st.integers(1, 64))
        inspect(np.concatenate([blob[:at], blob[at : at + length], blob[at:]]))


def test_headers_are_all_checked(states: list[np.ndarray]) -> None:
    """Every size and count of the head: changing one is noticed."""
    blob = states[0]
    # n_stream, n_cells, then (behind 7 cells of 12 bytes) v_transposed, n_layer, type, row size
    body = 16 + 7 * 12
    for at in (8, 12, body, body + 4, body + 8, body + 12):
        for change in (1, 0xFF):
            spoiled = blob.copy()
            spoiled[at] ^= change
            if at == body + 8 and change == 1:
                continue  # f16 (1) becomes f32 (0): a known type; the row size behind it is what counts
            assert not inspect(spoiled), (at, change)
    assert not inspect(np.empty(0, dtype=np.uint8))
    assert not inspect(blob[:8])
