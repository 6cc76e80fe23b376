"""Caches of conversations that others pushed out of the context: compressed ones are small enough to keep."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..cells import Snapshot
from ..errors import CacheStateError
from ..kv_cache import SEQ_ID
from ..llama import CompressedLlama

WORTH_TOKENS = 128  # reading fewer again costs less than keeping them


@dataclass(frozen=True)
class Kept:
    """One conversation: token ids int32 [n], llama.cpp's state uint8 [bytes], and which token each cell holds."""

    tokens: npt.NDArray[np.intc]
    state: npt.NDArray[np.uint8]
    snapshot: Snapshot

    @property
    def n_bytes(self) -> int:
        return int(self.state.nbytes)


def shared(cached: npt.NDArray[np.intc], tokens: npt.NDArray[np.intc]) -> int:
    """How many first tokens two conversations share."""
    n = min(cached.size, tokens.size)
    different = np.flatnonzero(cached[:n] != tokens[:n])
    return int(different[0]) if different.size else n


def usable(cached: npt.NDArray[np.intc], boundary: int, tokens: npt.NDArray[np.intc]) -> int:
    """Tokens of a cache that a prompt can go on from: none when it diverges inside what was compressed."""
    n = shared(cached, tokens)
    return n if n >= boundary else 0


class Conversations:
    """The least recently used is dropped when there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        return sum(kept.n_bytes for kept in list(self._kept.values()))

    def best(self, tokens: npt.NDArray[np.intc]) -> tuple[int, int]:
        """Tokens that the best one can save, and its number; 0 tokens where none helps."""
        found = ((usable(kept.tokens, kept.snapshot.boundary, tokens), n) for n, kept in list(self._kept.items()))
        return max(found, default=(0, -1))

    def snapshot(self, number: int) -> Snapshot:
        """Which token each of its cells holds; of one that was dropped meanwhile, nothing."""
        kept = self._kept.get(number)
        return Snapshot(0) if kept is None else kept.snapshot

    def put(self, llm: CompressedLlama) -> None:
        """Keeps what the context holds now."""
        if self.limit < 1 or llm.n_tokens < WORTH_TOKENS:
            return
        llm.kv.rollback(llm.n_tokens)
        self._kept[self._next] = Kept(llm._input_ids.copy(), llm.kv.sequence_state(), llm.kv.snapshot())
        self._next += 1
        while len(self._kept) > self.limit:
            self._kept.popitem(last=False)

    def swap(self, number: int, llm: CompressedLlama, *, put: bool) -> None:
        """Puts one back into the context, whose own is kept instead if `put`, and forgotten if not.

        Raises:
            CacheStateError: llama.cpp did not take it; the context is empty then.
        """
        kept = self._kept.pop(number)  # first: the newcomer might push it out
        if put:
            self.put(llm)
        llm.reset()
        pointer = kept.state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_set_data(llm.ctx, pointer, kept.state.size, SEQ_ID) != kept.state.size:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), False)
            raise CacheStateError("llama.cpp did not take a conversation back: send the request again")
        llm.kv.restore(kept.snapshot)
        llm._grow(kept.tokens.size)
        llm.input_ids[: kept.tokens.size] = kept.tokens
        llm.n_tokens = int(kept.tokens.size)
