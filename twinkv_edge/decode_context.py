"""Moving a compressed cache into a fresh, smaller context: where pages cannot be given back, the whole buffer can."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import llama_cpp
from llama_cpp import _internals

from ._install import native
from .errors import CacheStateError, InputError
from .kv_cache import SEQ_ID, KVCache, sequence_state

if TYPE_CHECKING:
    from .llama import CompressedLlama


def move(llm: CompressedLlama, n_ctx: int) -> None:
    """Makes a context of n_ctx cells, hands the cache over, and frees the old context.

    The old context is untouched until the new one holds everything. For that moment both exist: the peak is the old
    buffers, the new ones, and one copy of the cells in use.

    Raises:
        InputError: n_ctx is too small for the cells in use and one more token, or a LoRA adapter is loaded.
        CacheStateError: The new context could not be made, or did not take the cache. The old one goes on working.
    """
    used = llm.kv.n_cells
    if n_ctx <= used:
        raise InputError(f"n_ctx={n_ctx} is too small: {used} cells are in use, and the next token needs one")
    if llm.lora_path:
        raise InputError("a context with a LoRA adapter cannot be moved: its adapter belongs to the old context")
    tap = native.Tap()
    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    params.n_ctx = n_ctx
    params.cb_eval_user_data = ctypes.c_void_p(tap.user_data)
    snapshot = llm.kv.snapshot()
    try:
        ctx = _internals.LlamaContext(model=llm._model, params=params, verbose=llm.verbose)
    except ValueError as e:
        raise CacheStateError(f"no context of {n_ctx} cells could be made ({e}): free memory and try again") from e
    try:
        kv = KVCache(ctx.ctx, tap)
        kv.discover(lambda: llm._decode_one(ctx))
        if used:
            blob = sequence_state(llm.ctx)
            pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            if llama_cpp.llama_state_seq_set_data(ctx.ctx, pointer, blob.size, SEQ_ID) != blob.size:
                raise CacheStateError("the new context did not take the cache; the old one goes on working")
        kv.restore(snapshot)
    except BaseException:
        ctx.close()
        raise
    llm._adopt_context(llm._stack.enter_context(contextlib.closing(ctx)), tap, kv, params)
