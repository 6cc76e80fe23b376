"""The cache as policies and the repair see it: a layer at a time, hidden cells left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from . import captured, key_space
from .errors import CacheStateError
from .kv_cache import KVCache
from .policies.base import FloatArray, LayerView, Statistics, Window


@dataclass(frozen=True)
class Part:
    """Heads of a layer that hold the same number of tokens: all of them, or one by one.

    Attributes:
        view: What policies see: only these heads, only the cells they use.
        heads: Which heads of the layer.
        cells: Which cells of the layer, int [n].
        contents: What was made of keys and values by `content.content`, by the space of the keys: plans share it.
    """

    view: LayerView
    heads: slice
    cells: npt.NDArray[np.intp]
    contents: dict[str, tuple[npt.NDArray[np.float16], FloatArray]] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> bool:
        """Whether this is the whole layer."""
        return self.heads == slice(None)


def parts(kv: KVCache, index: int, space: str = "rope", notes: list[str] | None = None) -> list[Part]:
    """The layer, in one part unless its heads hold different numbers of tokens."""
    positions = kv._positions_by_head(index)
    notes = [] if notes is None else notes
    if (positions >= 0).all():
        cells = np.arange(positions.shape[1])
        return [Part(_view(kv, index, space, notes, slice(None), cells, _Reader(kv, index)), slice(None), cells)]
    reader, found = _Reader(kv, index), []
    for head, row in enumerate(positions):
        heads, cells = slice(head, head + 1), np.flatnonzero(row >= 0)
        found.append(Part(_view(kv, index, space, notes, heads, cells, reader), heads, cells))
    return found


class _Reader:
    """Reads a layer's cells once for all its parts."""

    def __init__(self, kv: KVCache, index: int) -> None:
        self.keys = cache(lambda: kv.keys(index))
        self.values = cache(lambda: kv.values(index))


def _heads_first(rows: FloatArray) -> FloatArray:
    """[n, H, d] -> [H, n, d], a copy only where heads are not first in memory already."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def _view(
    kv: KVCache,
    index: int,
    space: str,
    notes: list[str],
    heads: slice,
    cells: npt.NDArray[np.intp],
    reader: _Reader,
) -> LayerView:
    facts = kv.layers[index]
    positions = np.ascontiguousarray(kv._positions_by_head(index)[heads][:, cells])
    group = facts.n_head // facts.n_head_kv
    queries = slice(None) if heads == slice(None) else slice(heads.start * group, heads.stop * group)

    def read(rows: Callable[[], FloatArray]) -> FloatArray:
        return _heads_first(rows()[cells][:, heads])

    def transform(keys: FloatArray, into: str = space) -> FloatArray:
        if into == "rope":
            return keys
        rows = keys.transpose(1, 0, 2)
        if into == "unrotated":
            return _heads_first(key_space.unrotated(rows, positions.T, facts.rotation, kv.n_threads))
        return _heads_first(key_space.pair_norms(rows, facts.rotation))

    def read_window(size: int) -> Window:
        window, note = captured.last_queries(kv._tap, facts, kv.n_tokens, size)
        if note and note not in notes:
            notes.append(note)
        return Window(window.queries[:, queries], window.positions)

    def read_statistics() -> Statistics:
        mean, covariance = captured.query_statistics(kv._tap, facts, kv.n_tokens)
        return Statistics(mean[queries], covariance[queries])

    return LayerView(
        index=index,
        n_layers=kv.n_layers,
        positions=positions,
        n_tokens=kv.n_tokens,
        group=group,
        kq_scale=facts.kq_scale,
        read_keys=lambda: read(reader.keys),
        read_values=lambda: read(reader.values),
        transform_keys=transform,
        read_window=read_window,
        read_statistics=read_statistics,
        read_attention=lambda: captured.attention(kv._tap, facts, kv.n_tokens, kv.n_cells)[heads][:, cells],
        softcap=facts.softcap,
        rotation=facts.rotation,
        heads=heads,
        has_qk_norm=kv.facts.has_qk_norm,
        n_threads=kv.n_threads or None,
        notes=notes,
    )


def check_keys(layer: LayerView) -> None:
    """Raises CacheStateError when a key is not finite or has no length: similarity and norms mean nothing there."""
    norms: FloatArray = np.linalg.norm(layer.keys, axis=-1)
    _refuse(layer, ~np.isfinite(norms) | (norms == 0), "keys", "finite or zero")


def check_values(layer: LayerView) -> None:
    """Raises CacheStateError when a value is not finite."""
    _refuse(layer, ~np.isfinite(layer.values).all(axis=-1), "values", "finite")


def _refuse(layer: LayerView, bad: npt.ArrayLike, what: str, must: str) -> None:
    where = np.argwhere(bad)
    if len(where):
        head, cell = where[0]
        raise CacheStateError(
            f"{len(where)} {what} of layer {layer.index} are not {must} (the first: head {head}, token "
            f"{layer.positions[head, cell]}): the model's weights are broken or its activations overflow"
        )
