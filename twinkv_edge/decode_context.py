"""Moving a compressed cache into a fresh, smaller context: where pages cannot be given back, the whole buffer can."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp import _internals

from ._install import native
from .errors import CacheStateError, InputError
from .kv_cache import SEQ_ID, KVCache


@dataclass(frozen=True)
class Moved:
    """A context that holds what another held, with its own tap."""

    ctx: Any
    tap: Any
    kv: KVCache
    params: Any


def move(
    model: Any, params: Any, kv: KVCache, n_ctx: int, decode_one: Callable[[Any], None], verbose: bool = False
) -> Moved:
    """Makes a context of n_ctx cells like the one `params` made, and copies the cache into it.

    The old context is untouched. Until the caller frees it both exist: the peak is the old buffers, the new ones, and
    one copy of the cells in use.

    Args:
        model: llama_cpp._internals.LlamaModel of both contexts.
        params: Parameters the old context was made with.
        kv: The cache to move.
        n_ctx: Cells of the new context.
        decode_one: Decodes one token at position 0 of the context it is given.

    Raises:
        InputError: n_ctx is too small for the cells in use and one more token.
        CacheStateError: The new context could not be made, or did not take the cache. The old one goes on working.
    """
    if n_ctx <= kv.n_cells:
        raise InputError(f"n_ctx={n_ctx} is too small: {kv.n_cells} cells are in use, and the next token needs one")
    tap = native.Tap()
    params = type(params).from_buffer_copy(params)
    params.n_ctx = n_ctx
    params.cb_eval_user_data = ctypes.c_void_p(tap.user_data)
    try:
        ctx = _internals.LlamaContext(model=model, params=params, verbose=verbose)
    except ValueError as e:
        raise CacheStateError(f"no context of {n_ctx} cells could be made ({e}): free memory and try again") from e
    try:
        moved = KVCache(ctx.ctx, tap, kv.facts, kv.n_threads)
        moved.discover(lambda: decode_one(ctx))
        if kv.n_cells:
            blob = kv.sequence_state()
            pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            if llama_cpp.llama_state_seq_set_data(ctx.ctx, pointer, blob.size, SEQ_ID) != blob.size:
                raise CacheStateError("the new context did not take the cache; the old one goes on working")
        moved.restore(kv.snapshot())
    except BaseException:
        ctx.close()
        raise
    return Moved(ctx, tap, moved, params)
