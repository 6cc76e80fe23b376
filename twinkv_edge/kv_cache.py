"""The KV cache of one context: reading it, evicting from it, and knowing which token every cell holds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from . import layers
from ._install import native
from .cells import Cells, Snapshot
from .errors import CacheStateError, InputError, UnsupportedModelError
from .layers import Layer
from .models import ModelFacts
from .report import CompressionReport, Footprint

SEQ_ID = 0  # llama_cpp.Llama keeps its conversation in sequence 0
SPARE_SEQ = 1  # empty but for a moment during eviction
RELEASE_STEP = 256  # freed cells worth a system call


class KVCache:
    """Cells, heads and true token positions of a context's cache.

    Cell c of layer l holds, for head h, the key and value of the token at `positions(l)[c, h]`. Before any eviction
    that is token c for all; afterwards the first K cells hold what each head kept, and later tokens follow in order.
    Heads may keep different numbers: cells up to the largest are there, and what a head does not use is hidden from it.
    On sliding-window models only the full-attention layers are here: the others forget by themselves.
    """

    def __init__(self, ctx: Any, tap: Any, facts: ModelFacts, n_threads: int = 0) -> None:
        self._ctx = ctx
        self.facts = facts  # of the model
        self.n_threads = n_threads  # that reading, comparing and moving may take; 0: one per core
        self._tap = tap
        self._memory = llama_cpp.llama_get_memory(ctx)
        self.layers: tuple[Layer, ...] = ()
        self._cells = Cells()
        self._touched = 0  # cells written since the last release

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation, kept or evicted; the next one is decoded at this position."""
        return self._cells.n_tokens

    @property
    def boundary(self) -> int:
        """Tokens that were compressed: a rollback can reach back to here and no further. 0: nothing was."""
        return self._cells.boundary

    @property
    def n_compressed_cells(self) -> int:
        return self._cells.n_compressed

    @property
    def n_cells(self) -> int:
        """Cells in use, of the head that uses most."""
        return self._cells.n_cells

    @property
    def n_cells_allocated(self) -> int:
        return self.layers[0].n_cells

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_head_kv(self) -> int:
        return self.layers[0].n_head_kv

    def keys(self, layer: int) -> npt.NDArray[np.float32]:
        """Keys as cached (after RoPE), float32 [n_cells, H, d]."""
        return self._read(self._tap.read_k, layer, self._layer(layer).head_dim_k)

    def values(self, layer: int) -> npt.NDArray[np.float32]:
        """Values as cached, float32 [n_cells, H, d_v]."""
        return self._read(self._tap.read_v, layer, self._layer(layer).head_dim_v)

    def positions(self, layer: int) -> npt.NDArray[np.int32]:
        """True token position of every cell and head, int32 [n_cells, H], ascending per head; -1: hidden from it."""
        return np.ascontiguousarray(self._positions_by_head(layer).T)

    def _positions_by_head(self, layer: int) -> npt.NDArray[np.int32]:
        self._layer(layer)
        return self._cells.positions(layer)

    def _layer(self, layer: int) -> Layer:
        if not 0 <= layer < self.n_layers:
            raise InputError(f"no layer {layer}: the cache has layers 0 to {self.n_layers - 1}")
        return self.layers[layer]

    def _read(self, read: Any, layer: int, dim: int) -> npt.NDArray[np.float32]:
        facts = self._layer(layer)
        out = np.empty((self.n_cells, facts.n_head_kv, dim), dtype=np.float32)
        read(facts.tap_index, 0, out, self.n_threads)
        return out

    def footprint(self) -> Footprint:
        """What the cache occupies now."""
        allocated = resident = used = 0
        for index, layer in enumerate(self.layers):
            a, r = self._tap.memory(layer.tap_index)
            cells = self.n_cells - self.n_compressed_cells + self._cells.filled(index)
            allocated, resident, used = allocated + a, resident + r, used + a * cells // layer.n_cells
        return Footprint(self.n_cells, self.n_cells_allocated, allocated, used, resident)

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of tokens."""
        return self._cells.table is not None and bool((self._cells.table < 0).any())

    @property
    def can_hide(self) -> bool:
        """Whether heads may keep different numbers of cells: what is hidden is masked in host memory."""
        return all(layer.is_host for layer in self.layers)

    # -- evicting ------------------------------------------------------------------------------------------------

    def evict(self, retained: npt.NDArray[np.bool_]) -> CompressionReport:
        """Keeps the marked cells of every layer and head and gives the memory of the rest back.

        Args:
            retained: bool [L, H, n_cells]; any set with at least one cell for every layer and head. Cells that are
                hidden from a head stay so, marked or not.

        Raises:
            InputError: Wrong shape or type, or a head keeps nothing.
            UnsupportedModelError: Heads of different counts, and the cache is not in host memory.
            CacheStateError: The cache is empty, or was changed behind our back.
            StateFormatError: llama.cpp's state is not laid out as known. In every case the cache is as it was.
        """
        index = self._kept_cells(retained)
        before, n_before = self.footprint(), self.n_cells
        seconds = {"evict": 0.0, "release": 0.0}
        if any((self._cells.positions(i) >= 0).sum() > (cells >= 0).sum() for i, cells in enumerate(index)):
            self._check_untouched()
            start = time.perf_counter()
            self._tap.settle()
            told = self._move(index)
            self._cells.moved(index, told)
            for facts, cells in zip(self.layers, index, strict=True):
                self._tap.gather(facts.tap_index, cells)
            self._hide()
            evicted = time.perf_counter()
            self.release()
            seconds = {"evict": evicted - start, "release": time.perf_counter() - evicted}
        after = self.footprint()
        return CompressionReport(
            n_before=n_before,
            n_after=self.n_cells,
            n_after_mean=float((index >= 0).sum(axis=-1).mean()),
            n_tokens=self.n_tokens,
            bytes_before=before.bytes_used,
            bytes_after=after.bytes_used,
            resident_before=before.bytes_resident,
            resident_after=after.bytes_resident,
            seconds=seconds,
        )

    def _kept_cells(self, retained: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        index = self._cells.kept(retained)
        if index.min() < 0 and not self.can_hide:
            raise UnsupportedModelError(
                "heads keep different numbers of cells, which needs a cache in host memory: keep the same number"
            )
        return index

    def _hide(self) -> None:
        """Masks the cells that a head does not use, from now on."""
        for index, layer in enumerate(self.layers):
            self._tap.hide(layer.tap_index, np.ascontiguousarray(self._cells.hidden(index)[None], dtype=np.uint8))

    def mask(self, retained: npt.NDArray[np.bool_] | Sequence[npt.NDArray[np.bool_]] | None) -> None:
        """Hides from every head the cells that are not marked, without evicting them: attention is as after
        `evict(retained)`, and mask(None) takes it back. For comparing many sets on one cache.

        Args:
            retained: bool [L, H, n_cells], or None. Tokens decoded later are seen by all heads. Or several sets, of
                which `mask_rows` names one for every token of a batch; without it the first holds for all.

        Raises:
            InputError: Wrong shape or type, or a head keeps nothing.
            CacheStateError: The cache is empty, or was evicted from before.
            UnsupportedModelError: The cache is not in host memory.
        """
        if not self.can_hide:
            raise UnsupportedModelError("cells can be hidden only where the cache is in host memory: evict instead")
        if self._cells.table is not None:
            raise CacheStateError("only a cache from which nothing was evicted can be masked")
        if retained is None:
            self._hide()
            return
        sets = [retained] if isinstance(retained, np.ndarray) else list(retained)
        if not sets:
            raise InputError("no set of cells to mask by: give one, or None")
        for each in sets:
            self._kept_cells(each)
        for index, layer in enumerate(self.layers):
            self._tap.hide(layer.tap_index, np.stack([~each[index] for each in sets]).view(np.uint8))

    def mask_rows(self, sets: Sequence[int]) -> None:
        """Which set of `mask` every token of the next batches has: they must be as long; (): the first, for any batch.

        Where a batch is not as long, or names a set that is not there, its masks are left out and the tap says so.
        """
        self._tap.hide_rows(np.array(sets, dtype=np.int32))

    def _move(self, index: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Moves the kept cells to the front; returns the positions llama.cpp has for them afterwards.

        It only needs them to ascend and to end at n_tokens - 1; the true ones are in our table.
        """
        keep, last, ctx = index.shape[-1], self.n_tokens - 1, _address(self._ctx)
        if self.in_place:
            told = self._cells.all_told()
            layers = np.array([layer.tap_index for layer in self.layers], dtype=np.int32)
            tail = np.ascontiguousarray(told[keep - 1 :])
            native.evict_in_place(ctx, self._tap, SEQ_ID, SPARE_SEQ, layers, self.n_cells, index, tail, self.n_threads)
            told = told[:keep].copy()
            told[-1] = last
        else:
            told = np.arange(last - keep + 1, last + 1, dtype=np.int32)
            native.evict(ctx, SEQ_ID, index, told, self.n_threads)
        return told

    @property
    def in_place(self) -> bool:
        """Whether eviction moves rows inside the cache; otherwise it goes through a copy of the sequence's state
        (sliding-window models, caches in device memory, contexts without a spare sequence)."""
        one_cache = len(self.layers) == self._tap.n_layers
        spare = llama_cpp.llama_n_seq_max(self._ctx) > SPARE_SEQ
        return one_cache and spare and all(layer.is_host for layer in self.layers)

    def _check_untouched(self) -> None:
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, SEQ_ID)
        if last != self.n_tokens - 1:
            raise CacheStateError(
                f"llama.cpp's cache ends at position {last}, but {self.n_tokens} tokens were evaluated: it was "
                "changed from outside; call reset() and evaluate the prompt again"
            )
        for other in range(1, llama_cpp.llama_n_seq_max(self._ctx)):
            if llama_cpp.llama_memory_seq_pos_max(self._memory, other) >= 0:
                raise CacheStateError(
                    f"sequence {other} shares this cache: its cells cannot be told from ours; remove it first"
                )

    # -- following the conversation ------------------------------------------------------------------------------

    def advance(self, n: int) -> None:
        """n more tokens were decoded."""
        self._cells.n_tokens += n
        self._touched = max(self._touched, self.n_cells)

    def check_room(self, n: int) -> None:
        """Raises CacheStateError when n more tokens do not fit."""
        free = self.n_cells_allocated - self.n_cells
        if n > free:
            raise CacheStateError(
                f"{n} more tokens do not fit: {self.n_cells} of {self.n_cells_allocated} cells are in use; compress() "
                "first, or make the context with a larger n_ctx"
            )

    def rollback(self, n_tokens: int) -> None:
        """Takes tokens back until n_tokens are left.

        Raises:
            CacheStateError: That would reach into the compressed part; only 0 (start over) can.
        """
        if n_tokens == self.n_tokens:
            return
        if n_tokens > self.n_tokens:
            raise CacheStateError(
                f"{n_tokens} tokens are claimed, but only {self.n_tokens} were evaluated: call reset() first"
            )
        if 0 < n_tokens < self.boundary:
            raise CacheStateError(
                f"cannot go back to {n_tokens} tokens: the first {self.boundary} were compressed as a whole; "
                "call reset() and evaluate the prompt again"
            )
        llama_cpp.llama_memory_seq_rm(self._memory, SEQ_ID, n_tokens, -1)
        if n_tokens > 0:
            self._tap.rollback(n_tokens)
            self._cells.n_tokens = n_tokens
        else:
            self._tap.reset()
            self._cells.restore(Snapshot(0))
            self._hide()
        if self._touched - self.n_cells >= RELEASE_STEP:
            self.release()

    def release(self) -> int:
        """Gives the memory of cells that no head uses back to the system; returns the bytes given back."""
        self._touched = self.n_cells
        released = 0
        for index, layer in enumerate(self.layers):
            released += self._tap.release(layer.tap_index, self.n_cells, layer.n_cells)
            released += self._tap.release(layer.tap_index, self._cells.filled(index), self.n_compressed_cells)
        return released

    def snapshot(self) -> Snapshot:
        return self._cells.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot, after llama.cpp's own state was restored."""
        self._cells.restore(snapshot)
        self._touched = self.n_cells_allocated
        self._tap.reset()
        self._hide()
        self.release()

    def sequence_state(self) -> npt.NDArray[np.uint8]:
        """llama.cpp's own state of the conversation: uint8 [size]."""
        size = llama_cpp.llama_state_seq_get_size(self._ctx, SEQ_ID)
        blob = np.empty(size, dtype=np.uint8)
        pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_get_data(self._ctx, pointer, size, SEQ_ID) != size:
            raise UnsupportedModelError("llama.cpp did not hand out the sequence's state")
        return blob

    # -- learning the layers -------------------------------------------------------------------------------------

    def discover(self, decode_one: Any) -> None:
        """Learns the layers from one decoded token, then takes it back; see `layers.discover`."""
        self.layers = layers.discover(self._tap, decode_one, self.sequence_state)
        self._cells = Cells(self.n_layers, self.n_head_kv)
        llama_cpp.llama_memory_clear(self._memory, False)
        self._tap.reset()
        self.release()


def _address(ctx: Any) -> int:
    return int(ctypes.cast(ctx, ctypes.c_void_p).value or 0)
