"""The layers of a context that can be evicted from, as the tap saw them in the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._install import native
from .errors import UnsupportedModelError
from .key_space import Rotation


@dataclass(frozen=True)
class Layer:
    """Facts of one evictable layer, as its graph shows them. `il` is llama.cpp's number of the layer."""

    tap_index: int
    il: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: int
    type_v: int
    v_transposed: bool
    is_host: bool
    n_cells: int
    kq_scale: float
    softcap: float
    rotation: Rotation


def discover(tap: Any, decode_one: Callable[[], None], state: Callable[[], npt.NDArray[np.uint8]]) -> tuple[Layer, ...]:
    """The layers as one decoded token shows them; the others are not watched any more.

    Args:
        decode_one: Decodes a token at position 0.
        state: llama.cpp's sequence state, uint8 [size].

    Raises:
        UnsupportedModelError: The model keeps no cache that can be rewritten.
        StateFormatError: llama.cpp's state is not laid out as known.
    """
    decode_one()
    if failure := tap.take_failure():
        raise UnsupportedModelError(failure)
    if tap.n_layers == 0:
        raise UnsupportedModelError(
            "no attention layer with a KV cache was seen: the model is recurrent, hybrid, MLA or an encoder"
        )
    found = match(tap, state())
    known = {layer.tap_index for layer in found}
    for index in range(tap.n_layers):
        tap.watch(index, index in known)
    return found


def match(tap: Any, state: npt.NDArray[np.uint8]) -> tuple[Layer, ...]:
    """The layers in the order of llama.cpp's sequence state, uint8 [size], which is proved to be laid out as known.

    Raises:
        UnsupportedModelError: Their heads differ.
        StateFormatError: The state is not laid out as known, or is not that of these layers.
    """
    indices = np.empty(native.state_inspect(state)["n_layer"], dtype=np.int32)
    native.state_match(tap, state, indices)
    found = tuple(_layer(tap, int(i)) for i in indices)
    shapes = {(x.n_head_kv, x.head_dim_k, x.head_dim_v) for x in found}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"KV heads differ from layer to layer ({sorted(shapes)})")
    return found


def _layer(tap: Any, index: int) -> Layer:
    f = tap.layer(index)
    names = [name for name in Layer.__dataclass_fields__ if name not in ("tap_index", "rotation")]
    return Layer(tap_index=index, rotation=Rotation(f["rope"], f["hadamard"]), **{name: f[name] for name in names})
