"""Many compressions of one prompt decoded side by side: a batch of many is much faster than many batches of one.

Every lane is a sequence of its own in the one cache. It shares the prompt's cells, which copies nothing, and only its
own tokens see what it decodes: llama.cpp keeps sequences apart. What each lane sees of the prompt is its own set of
cells, hidden by the masks of `KVCache.mask`, so that its logits are those of an evicted cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import llama_cpp
import numpy as np
import numpy.typing as npt

from .errors import CacheStateError, InputError, UnsupportedModelError
from .kv_cache import SEQ_ID, SPARE_SEQ
from .llama import CompressedLlama

FloatArray = npt.NDArray[np.float32]


class Lanes:
    """Sequences that go on from the prompt in the cache, each under a set of cells of its own.

    The cells of a lane are in the order of its tokens, as if it were alone, because none are given back before all are:
    sums in another order could tip the scales between two tokens.

    To be used as a context manager: afterwards the cache is as before. Nothing may be captured, evaluated or evicted
    meanwhile.

    Args:
        llm: With the prompt evaluated and nothing evicted.
        sets: bool [L, H, n_cells] for each lane: the cells that every layer and head keeps. At most `most(llm)`.

    Raises:
        InputError: A set of the wrong shape, or more lanes than the context has sequences for.
        CacheStateError: The cache is empty, or was evicted from.
        UnsupportedModelError: The cache is not in host memory, or the context's sequences do not share one.
    """

    def __init__(self, llm: CompressedLlama, sets: Sequence[npt.NDArray[np.bool_]]) -> None:
        n = len(sets)
        if n > most(llm):
            raise InputError(f"{n} lanes: the context has room for {most(llm)}; open it with n_seq_max={n + 1}")
        self._llm, self._sets = llm, sets
        self._memory = llama_cpp.llama_get_memory(llm.ctx)
        self._start = llm.kv.n_tokens
        self._used = [0] * n  # tokens decoded in each

    def __enter__(self) -> Lanes:
        self._llm.kv.mask(self._sets)
        for lane in range(len(self._sets)):
            llama_cpp.llama_memory_seq_cp(self._memory, SEQ_ID, SPARE_SEQ + lane, -1, -1)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        for lane in range(len(self._sets)):
            llama_cpp.llama_memory_seq_rm(self._memory, SPARE_SEQ + lane, -1, -1)
        self._llm.kv.mask(None)

    def begin_again(self) -> None:
        """All lanes are at the end of the prompt again, and their cells are free."""
        for lane in range(len(self._sets)):
            llama_cpp.llama_memory_seq_rm(self._memory, SPARE_SEQ + lane, self._start, -1)
            self._used[lane] = 0

    def decode(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, FloatArray]:
        """Evaluates tokens at the end of lanes, in one batch.

        Args:
            tokens: For each lane at least one; at most n_batch in all.

        Returns:
            For each lane the logits after its last token, float32 [vocabulary]: views of llama.cpp's own memory, good
            until the next evaluation.

        Raises:
            InputError: More than n_batch tokens, or no such lane.
            CacheStateError: No room for them; the lanes are as they were.
        """
        llm = self._llm
        rows = [(lane, token, i) for lane, each in tokens.items() for i, token in enumerate(each)]
        if len(rows) > llm.n_batch:
            raise InputError(f"{len(rows)} tokens at once: at most n_batch = {llm.n_batch}")
        if not all(0 <= lane < len(self._sets) for lane in tokens):
            raise InputError(f"lanes {sorted(tokens)}: there are {len(self._sets)}, from 0")
        batch = llm._batch.batch
        batch.n_tokens = len(rows)
        for r, (lane, token, i) in enumerate(rows):
            batch.token[r] = token
            batch.pos[r] = self._start + self._used[lane] + i
            batch.n_seq_id[r] = 1
            batch.seq_id[r][0] = SPARE_SEQ + lane
            batch.logits[r] = i == len(tokens[lane]) - 1
        llm.kv.mask_rows([lane for lane, _, _ in rows])
        try:
            code = llama_cpp.llama_decode(llm.ctx, batch)
        finally:
            llm.kv.mask_rows(())
        if code == 1:
            raise CacheStateError(f"{len(rows)} more tokens in lanes do not fit: begin_again(), or a larger n_ctx")
        if code:
            raise CacheStateError(f"llama.cpp could not decode (llama_decode returned {code})")
        if failure := llm._tap.take_failure():
            raise UnsupportedModelError(failure)
        for lane, each in tokens.items():
            self._used[lane] += len(each)
        found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (len(tokens), llm.n_vocab()))
        return dict(zip(tokens, found, strict=True))


def most(llm: CompressedLlama) -> int:
    """Lanes that a context can have: its sequences but for the conversation's own; 0 where cells cannot be hidden."""
    if not (llm.kv.can_hide and llm.kv.in_place):
        return 0
    return int(llama_cpp.llama_n_seq_max(llm.ctx)) - SPARE_SEQ
