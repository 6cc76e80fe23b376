from __future__ import annotations

import os

import numpy as np

from .. import calibrate
from ..errors import CacheStateError, InputError
from ..key_space import hadamard
from ..models.fingerprint import fingerprint
from .base import FloatArray, LayerView, Policy


class QFilters(Policy):
    """Keeps keys that lie in the main direction of their head's queries, found once per model from a text.

    Q-Filters: Leveraging Query-Key Geometry for Efficient Key-Value Cache Compression (Godey et al., 2025). Queries of
    a head share a main direction, so a key's product with it stands for the attention it will draw. Needs no queries of
    the prompt.
    """

    name = "qfilters"
    summary = "keeps keys in the main direction of queries; needs `twinkv-edge calibrate` (Godey et al., 2025)"

    def __init__(self, filters: str | os.PathLike[str] | None = None) -> None:
        self.path = filters
        self._filters: calibrate.Filters | None = None

    def bind(self, model: str | os.PathLike[str]) -> None:
        mark = fingerprint(model)
        self._filters = calibrate.load(calibrate.default_path(mark) if self.path is None else self.path, mark)

    def score(self, layer: LayerView) -> FloatArray:
        if self._filters is None:
            raise CacheStateError("qfilters does not know its model: use it through CompressedLlama")
        directions = self._filters.directions[layer.index]
        if directions.shape[-1] != layer.keys.shape[2]:
            raise InputError("the Q-Filters are of another shape than this model's keys: calibrate again")
        if layer.rotation.hadamard:
            directions = directions @ hadamard(layer.rotation.hadamard, directions.shape[-1])
        return np.asarray(np.einsum("hnd,hd->hn", layer.keys, directions[layer.heads]), dtype=np.float32)
