"""Which token every cell holds, head by head: what an eviction per head must remember and llama.cpp cannot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import CacheStateError, InputError

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Snapshot:
    """What is known beyond llama.cpp's own state: saved and restored beside it."""

    n_tokens: int
    table: IntArray | None = None
    boundary: int = 0
    told: IntArray | None = None


class Cells:
    """The compressed cells first, K of them for all heads, then one cell for every token since.

    A head that keeps fewer than K tokens has them in its first cells; the rest up to K are hidden from it.

    Attributes:
        n_tokens: Tokens of the conversation, kept or evicted.
        boundary: Tokens that were compressed; 0: none were.
        table: int32 [L, H, K] positions of the compressed cells, -1 where hidden; None: nothing was compressed.
        told: int32 [K] positions that llama.cpp has for the compressed cells.
    """

    def __init__(self, n_layers: int = 0, n_heads: int = 0) -> None:
        self._shape = n_layers, n_heads
        self.restore(Snapshot(0))

    def restore(self, snapshot: Snapshot) -> None:
        self.n_tokens = snapshot.n_tokens
        self.boundary = snapshot.boundary
        self.table = None if snapshot.table is None else snapshot.table.copy()
        self.told = np.empty(0, dtype=np.int32) if snapshot.told is None else snapshot.told.copy()

    def snapshot(self) -> Snapshot:
        if self.table is None:
            return Snapshot(self.n_tokens)
        return Snapshot(self.n_tokens, self.table.copy(), self.boundary, self.told.copy())

    @property
    def n_compressed(self) -> int:
        """K."""
        return 0 if self.table is None else int(self.table.shape[-1])

    @property
    def n_cells(self) -> int:
        """Cells in use."""
        return self.n_compressed + self.n_tokens - self.boundary

    def positions(self, layer: int) -> IntArray:
        """True positions, int32 [H, n_cells], -1 where a cell is hidden from the head."""
        tail = np.arange(self.boundary, self.n_tokens, dtype=np.int32)
        tail = np.broadcast_to(tail, (self._shape[1], tail.size))
        return tail.copy() if self.table is None else np.concatenate([self.table[layer], tail], axis=1)

    def all_told(self) -> IntArray:
        """Positions that llama.cpp has, int32 [n_cells]."""
        return np.concatenate([self.told, np.arange(self.boundary, self.n_tokens, dtype=np.int32)])

    def hidden(self, layer: int) -> npt.NDArray[np.bool_]:
        """bool [H, K]; [H, 0] where no head of the layer hides anything."""
        if self.table is None or (self.table[layer] >= 0).all():
            return np.zeros((self._shape[1], 0), dtype=np.bool_)
        hidden: npt.NDArray[np.bool_] = self.table[layer] < 0
        return hidden

    def filled(self, layer: int) -> int:
        """Compressed cells that some head of the layer uses; those from here to K are nobody's."""
        return 0 if self.table is None else int((self.table[layer] >= 0).sum(axis=-1).max())

    def kept(self, retained: npt.NDArray[np.bool_]) -> IntArray:
        """The cells to keep, int32 [L, H, K]: those marked and not hidden, ascending, then -1.

        Raises:
            CacheStateError: There are no cells.
            InputError: retained is not bool [L, H, n_cells], or a head keeps nothing.
        """
        shape = (*self._shape, self.n_cells)
        if self.n_cells == 0:
            raise CacheStateError("the cache is empty: evaluate a prompt before evicting from it")
        if not isinstance(retained, np.ndarray) or retained.dtype != np.bool_ or retained.shape != shape:
            given = f"{retained.dtype} {list(retained.shape)}" if isinstance(retained, np.ndarray) else type(retained)
            raise InputError(f"retained must be a bool array [layers, KV heads, cells] = {list(shape)}, not {given}")
        marked = [retained[layer] & (self.positions(layer) >= 0) for layer in range(self._shape[0])]
        most = max(int(m.sum(axis=-1).max()) for m in marked)
        index = np.full((*self._shape, most), -1, dtype=np.int32)
        for layer, heads in enumerate(marked):
            for head, cells in enumerate(heads):
                found = np.flatnonzero(cells)
                index[layer, head, : found.size] = found
        if most == 0 or index[..., 0].min() < 0:
            raise InputError("a head retains nothing: keep at least one cell per head")
        return index

    def moved(self, index: IntArray, told: IntArray) -> None:
        """The cells of `index` are now cells 0 .. K-1."""
        table = np.full(index.shape, -1, dtype=np.int32)
        for layer, cells in enumerate(index):
            positions = np.take_along_axis(self.positions(layer), np.maximum(cells, 0), axis=1)
            table[layer] = np.where(cells >= 0, positions, -1)
        self.table, self.told, self.boundary = table, told, self.n_tokens
