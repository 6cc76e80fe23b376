"""What the policies that look at attention share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base import FloatArray, LayerView, Window


def softmax(logits: FloatArray) -> FloatArray:
    """Along the last axis, in place."""
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


def window_attention(layer: LayerView, window: Window) -> FloatArray:
    """Attention that each key receives from the queries of the window, mean over queries and group: float32 [H, n].

    Each query attends to the cached keys at its own position and before, as it did when its token was evaluated; keys
    evicted since are gone for it too.
    """
    out = np.empty(layer.positions.shape, dtype=np.float32)
    for head in range(len(out)):
        keys = layer.keys[head]
        group: FloatArray = window.queries[:, head * layer.group : (head + 1) * layer.group]
        logits = group.reshape(len(window.positions) * layer.group, -1) @ keys.T
        logits *= layer.kq_scale
        if layer.softcap:
            logits = layer.softcap * np.tanh(logits / layer.softcap)
        # only the newest cells can be ahead of a query of the window
        first = int(np.searchsorted(layer.positions[head], window.positions[0]))
        ahead: npt.NDArray[np.bool_] = layer.positions[head, None, first:] > window.positions[:, None]
        logits[:, first:][np.repeat(ahead, layer.group, axis=0)] = -np.inf
        out[head] = softmax(logits).mean(axis=0)
    return out
