"""Putting a saved cache into a context: all is checked first, and the old cache comes back if llama.cpp refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .._install import native
from ..cells import Snapshot
from ..errors import CacheStateError, SessionError
from ..kv_cache import SEQ_ID

if TYPE_CHECKING:
    from ..kv_cache import KVCache
    from ..llama import CompressedLlama
    from .contents import Contents

State = npt.NDArray[np.uint8]

_CELLS_AT = 16  # magic, seq_id, n_stream, n_cells: see native/state/state.hpp
_CELL = np.dtype([("pos", "<i4"), ("n_seq_id", "<u4"), ("seq_id", "<i4")])


def snapshot_of(contents: Contents, arrays: dict[str, npt.NDArray[Any]], path: Path, n_vocab: int) -> Snapshot:
    """What our table needs, once the arrays agree with the head, the state, and each other.

    llama.cpp's state is parsed here by our own strict reader before llama.cpp sees it. The positions that llama.cpp has
    for the cells are taken from it.

    Raises:
        SessionError, StateFormatError: They do not: a file with right checksums that was made so, on purpose or not.
    """

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise SessionError(f"{path} contradicts itself ({what}); make it again")

    try:
        tokens, table, state = arrays["tokens"], arrays["positions"], arrays["state"]
    except KeyError as e:
        raise SessionError(f"{path} has no {e}; make it again") from None
    n, kind, boundary = contents.n_tokens, contents.cache, contents.boundary
    require(set(arrays) == {"tokens", "positions", "state"}, "unknown arrays")
    require([a.dtype for a in (tokens, table, state)] == [np.int32, np.int32, np.uint8], "types of the arrays")
    require(tokens.shape == (n,) and n > 0, "number of tokens")
    require(bool((tokens >= 0).all() and (tokens < n_vocab).all()), "tokens that the model does not have")
    require(table.ndim == 3 and table.shape[:2] == (len(kind.layers), kind.n_head_kv), "shape of the positions")
    n_compressed = table.shape[-1]
    require((n_compressed == 0) == (boundary == 0) and n_compressed <= boundary <= n, "the compressed part")
    require(contents.n_cells == n_compressed + n - boundary, "number of cells")
    require(state.ndim == 1, "shape of the state")
    info = native.state_inspect(state)
    require(info["n_layer"] == len(kind.layers) and info["n_sections"] == kind.n_caches, "layers of the state")
    require(info["v_transposed"] == kind.v_transposed, "layout of V")
    require(info["n_cells"] == contents.n_cells, "cells of the state")
    told = np.frombuffer(state, dtype=_CELL, count=contents.n_cells, offset=_CELLS_AT)["pos"].astype(np.int32)
    require(bool((np.diff(told) > 0).all()), "positions in the state do not ascend")
    require(bool((told[n_compressed:] == np.arange(boundary, n)).all() and told[-1] == n - 1), "positions in the state")
    if not boundary:
        return Snapshot(n)
    _check_table(table, boundary, require)
    return Snapshot(n, table, boundary, told[:n_compressed].copy())


def _check_table(table: npt.NDArray[np.int32], boundary: int, require: Any) -> None:
    """Per layer and head: true positions that ascend from cell to cell, at least one, and -1 after the last."""
    used = table >= 0
    require(bool((table >= -1).all() and (table < boundary).all() and used[..., 0].all()), "true positions")
    require(bool((used[..., 1:] <= used[..., :-1]).all()), "hidden cells that are not the last")
    ascends = np.diff(table, axis=-1) > 0
    require(bool((ascends | ~used[..., 1:]).all()), "true positions that do not ascend")


def restore(llm: CompressedLlama, snapshot: Snapshot, state: State, tokens: npt.NDArray[np.int32], path: Path) -> None:
    """Makes the cache of `llm` the saved one.

    Raises:
        CacheStateError: llama.cpp's cache was changed from outside, or another sequence shares it.
        SessionError: llama.cpp does not take the state; the cache is as it was.
    """
    kv = llm.kv
    kv._check_untouched()
    before = kv.snapshot()
    old = kv.sequence_state() if before.n_tokens else None
    try:
        if not _give(kv, state):
            raise SessionError(
                f"llama.cpp did not take the cache of {path}: the sliding window's cells may need a larger n_ctx or "
                "n_batch, those it was saved with"
            )
        kv.restore(snapshot)
        llm._grow(snapshot.n_tokens)
        llm.input_ids[: snapshot.n_tokens] = tokens
    except BaseException:
        _put_back(kv, before, old)
        raise
    llm.n_tokens = snapshot.n_tokens
    llm._requires_eval = True  # logits are not saved: the next sampling decodes a token first


def _give(kv: KVCache, state: State) -> bool:
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    return int(llama_cpp.llama_state_seq_set_data(kv._ctx, pointer, state.size, SEQ_ID)) == state.size


def _put_back(kv: KVCache, before: Snapshot, old: State | None) -> None:
    llama_cpp.llama_memory_seq_rm(kv._memory, SEQ_ID, -1, -1)
    if old is not None and not _give(kv, old):
        kv.restore(Snapshot(0))
        raise CacheStateError("llama.cpp took neither the session nor the old cache back: call reset()")
    kv.restore(before)
