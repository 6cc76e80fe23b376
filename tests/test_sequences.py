"""Two sequences in one context: only the named one is touched."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from conftest import decode, logits, random_sets

import twinkv_edge as tk
from twinkv_edge._install import native
from twinkv_edge.kv_cache import _address

OTHER = 2


def decode_other(llm: tk.CompressedLlama, tokens: list[int], start: int) -> np.ndarray:
    """Decodes tokens of the other sequence; the last one's logits."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, start + i
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, OTHER
        batch.logits[i] = i == len(tokens) - 1
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    return logits(llm)


def test_evicting_one_sequence_leaves_the_other_alone(smollm2: str, licence_tokens: list[int]) -> None:
    q8_0 = llama_cpp.GGML_TYPE_Q8_0
    llm = tk.CompressedLlama(smollm2, n_ctx=1024, n_seq_max=3, n_threads=2, type_k=q8_0, type_v=q8_0)
    try:
        llm.eval(licence_tokens[:200])
        decode_other(llm, licence_tokens[500:600], 0)
        with pytest.raises(tk.CacheStateError, match=f"sequence {OTHER} shares this cache"):
            llm.kv.evict(random_sets(llm, keep=50))
        memory = llama_cpp.llama_get_memory(llm.ctx)
        expected = decode_other(llm, [licence_tokens[600]], 100)
        assert llama_cpp.llama_memory_seq_rm(memory, OTHER, 100, -1)
        retained = random_sets(llm, keep=50)
        index = np.nonzero(retained)[2].astype(np.int32).reshape(30, 3, 50)
        told = np.arange(150, 200, dtype=np.int32)
        native.evict(_address(llm.ctx), 0, index, told)
        np.testing.assert_array_equal(decode_other(llm, [licence_tokens[600]], 100), expected)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == 199
    finally:
        llm.close()


def test_a_state_of_a_plain_llama_is_taken(smollm2: str, licence_tokens: list[int]) -> None:
    settings = {"n_ctx": 512, "n_threads": 2, "type_k": 8, "type_v": 8, "flash_attn": True, "verbose": False}
    plain = llama_cpp.Llama(smollm2, **settings)
    plain.eval(licence_tokens[:150])
    state = plain.save_state()
    llm = tk.CompressedLlama(smollm2, **settings)
    llm.eval(licence_tokens[300:400])
    llm.compress(policy="knorm", ratio=0.2, n_recent=16)
    llm.load_state(state)
    assert (llm.n_tokens, llm.kv.n_cells, llm.kv.boundary) == (150, 150, 0)
    plain.eval([licence_tokens[150]])
    expected = np.ctypeslib.as_array(llama_cpp.llama_get_logits(plain.ctx), (plain.n_vocab(),)).copy()
    np.testing.assert_array_equal(decode(llm, [licence_tokens[150]])[0], expected)
    llm.compress(policy="knorm", ratio=0.5, n_recent=16)
    assert llm.kv.n_cells == 76
    plain.close()
    llm.close()
