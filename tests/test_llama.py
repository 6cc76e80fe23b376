"""All of llama_cpp.Llama goes on working before and after compress(), and what is refused is refused whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import decode, logits, random_sets

import twinkv_edge as tk

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
COMPRESS = {"policy": "knorm", "ratio": 0.5, "n_recent": 32}


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[tk.CompressedLlama]:
    llm = tk.CompressedLlama(smollm2, n_ctx=1024, n_threads=2, type_k=Q8_0, type_v=Q8_0, logits_all=True)
    yield llm
    llm.close()


@pytest.fixture
def fresh(llm: tk.CompressedLlama) -> tk.CompressedLlama:
    llm.reset()
    return llm


def state_of(llm: tk.CompressedLlama) -> tuple[Any, ...]:
    """What must not change when an operation is refused."""
    last = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)
    keys = llm.kv.keys(3).tobytes()
    return llm.n_tokens, llm.kv.n_cells, llm.kv.boundary, last, keys, llm.kv.positions(5).tobytes()


# -- generation ------------------------------------------------------------------------------------------------------


def test_it_is_a_llama(llm: tk.CompressedLlama) -> None:
    assert isinstance(llm, llama_cpp.Llama)
    assert llm.tau == 0.90  # no QK-norm


def test_qk_norm_model_has_its_own_tau(qwen3_tiny: str, open_llm: Callable[..., tk.CompressedLlama]) -> None:
    assert open_llm(qwen3_tiny).tau == 0.85


def test_uncompressed_it_answers_as_llama_does(
    fresh: tk.CompressedLlama, smollm2: str, licence_tokens: list[int]
) -> None:
    plain = llama_cpp.Llama(
        smollm2, n_ctx=1024, n_threads=2, type_k=Q8_0, type_v=Q8_0, flash_attn=True, logits_all=True, verbose=False
    )
    prompt = licence_tokens[:200]
    plain.eval(prompt)
    fresh.eval(prompt)
    np.testing.assert_array_equal(fresh.scores[:200], plain.scores[:200])
    plain.close()


def test_chat_streaming_stop_grammar_and_logprobs_after_compression(
    fresh: tk.CompressedLlama, licence_tokens: list[int]
) -> None:
    fresh.eval(licence_tokens[:300])
    report = fresh.compress(**COMPRESS)
    assert (report.n_before, report.n_after) == (300, 150)
    prompt = licence_tokens[:320]
    done = fresh.create_completion(prompt, max_tokens=12, temperature=0, logprobs=2)
    assert fresh.kv.boundary == 300  # the prefix was reused, compressed as it is
    assert len(done["choices"][0]["logprobs"]["tokens"]) == 12
    streamed = fresh.create_completion(prompt, max_tokens=12, temperature=0, stream=True)
    assert "".join(piece["choices"][0]["text"] for piece in streamed) == done["choices"][0]["text"]
    stop = done["choices"][0]["text"].split()[2]
    stopped = fresh.create_completion(prompt, max_tokens=12, temperature=0, stop=[stop])
    assert stop not in stopped["choices"][0]["text"]
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    answer = fresh.create_completion(prompt, max_tokens=4, temperature=0, grammar=grammar)
    assert answer["choices"][0]["text"] in ("yes", "no")
    chat = fresh.create_chat_completion(messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
    assert chat["choices"][0]["message"]["content"]


def test_decoding_goes_on_at_the_true_position(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    fresh.eval(licence_tokens[300:305])
    memory = llama_cpp.llama_get_memory(fresh.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == 304
    assert fresh.kv.positions(0)[-1].tolist() == [304] * 3
    assert fresh.kv.n_cells == 155


# -- prefix reuse ----------------------------------------------------------------------------------------------------


def evaluated_by(llm: tk.CompressedLlama, prompt: list[int]) -> int:
    """Tokens that Llama evaluates to sample one token after this prompt."""
    seen = []
    original = llm._ctx.decode
    llm._ctx.decode = lambda batch: (seen.append(batch.n_tokens()), original(batch))[1]
    try:
        next(llm.generate(prompt, temp=0.0))
    finally:
        llm._ctx.decode = original
    return sum(seen)


def test_a_prompt_that_appends_is_not_evaluated_again(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    assert evaluated_by(fresh, licence_tokens[:310]) == 10
    assert fresh.kv.n_cells == 160
    # back to just behind the compressed part
    assert evaluated_by(fresh, [*licence_tokens[:304], 7, 8]) == 2
    assert fresh.kv.boundary == 300


def test_a_prompt_that_diverges_inside_the_compressed_part_is_evaluated_again(
    fresh: tk.CompressedLlama, licence_tokens: list[int]
) -> None:
    prompt = [*licence_tokens[:200], *licence_tokens[:50]]
    fresh.eval(prompt)
    expected = logits(fresh)
    fresh.reset()
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    assert evaluated_by(fresh, prompt) == len(prompt)
    assert fresh.kv.boundary == 0
    np.testing.assert_array_equal(logits(fresh), expected)


def test_the_same_prompt_again_samples_from_the_live_logits(
    fresh: tk.CompressedLlama, licence_tokens: list[int]
) -> None:
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    assert evaluated_by(fresh, licence_tokens[:300]) == 0
    # without live logits the last token would have to be decoded again, and it is part of what was compressed
    fresh._requires_eval = True
    assert evaluated_by(fresh, licence_tokens[:300]) == 300


# -- states ----------------------------------------------------------------------------------------------------------


def test_saved_states_carry_the_true_positions(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    state = pickle.loads(pickle.dumps(fresh.save_state()))
    positions = [fresh.kv.positions(layer) for layer in range(30)]
    expected = decode(fresh, licence_tokens[300:304])
    fresh.reset()
    fresh.eval(licence_tokens[500:600])
    fresh.load_state(state)
    assert (fresh.n_tokens, fresh.kv.n_cells, fresh.kv.boundary) == (300, 150, 300)
    assert all((fresh.kv.positions(layer) == positions[layer]).all() for layer in range(30))
    np.testing.assert_array_equal(decode(fresh, licence_tokens[300:304]), expected)


def test_a_llama_cache_holds_compressed_states(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.set_cache(llama_cpp.LlamaRAMCache())
    try:
        fresh.eval(licence_tokens[:200])
        fresh.compress(**COMPRESS)
        first = fresh.create_completion(licence_tokens[:210], max_tokens=6, temperature=0)
        fresh.create_completion(licence_tokens[600:700], max_tokens=2, temperature=0)
        again = fresh.create_completion(licence_tokens[:210], max_tokens=6, temperature=0)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
    finally:
        fresh.set_cache(None)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_refusals_change_nothing(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    with pytest.raises(tk.CacheStateError, match="empty"):
        fresh.compress(ratio=0.5)
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    fresh.eval(licence_tokens[300:320])
    before = state_of(fresh)
    full = np.ones((30, 3, 170), dtype=np.bool_)
    for bad, match in (
        (full[:, :2], "layers, KV heads, cells"),
        (full[..., :100], "layers, KV heads, cells"),
        (full.astype(np.float32), "bool array"),
        (full.tolist(), "bool array"),
        (np.zeros_like(full), "at least one"),
    ):
        with pytest.raises(tk.InputError, match=match):
            fresh.kv.evict(bad)
        assert state_of(fresh) == before
    for changes, error in (
        ({"ratio": 1.0}, tk.InputError),
        ({"ratio": 0.95}, tk.InputError),
        ({"policy": "oracle"}, tk.InputError),
        ({"policy_options": {"seed": 1}, "policy": "knorm"}, tk.InputError),
        ({"wrong": 1}, tk.InputError),
        ({"layout": "cell"}, tk.CacheStateError),
    ):
        with pytest.raises(error):
            fresh.compress(**changes)
        assert state_of(fresh) == before


def test_a_failure_midway_leaves_the_cache_as_it_was(
    fresh: tk.CompressedLlama, licence_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.eval(licence_tokens[:300])
    expected = decode(fresh, licence_tokens[300:304])
    fresh.n_tokens = 300
    fresh.kv.rollback(300)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no power")

    monkeypatch.setattr(tk.policies.KNorm, "score", broken)
    with pytest.raises(RuntimeError, match="no power"):
        fresh.compress(**COMPRESS)
    assert (fresh.kv.n_cells, fresh.kv.boundary) == (300, 0)
    np.testing.assert_array_equal(decode(fresh, licence_tokens[300:304]), expected)


def test_keys_that_are_not_finite_are_refused(
    fresh: tk.CompressedLlama, licence_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.eval(licence_tokens[:200])
    original = tk.KVCache.keys

    def spoiled(self: tk.KVCache, layer: int) -> np.ndarray:
        keys = original(self, layer)
        if layer == 2:
            keys[17, 1] = np.nan
            keys[18, 0] = 0
        return keys

    monkeypatch.setattr(tk.KVCache, "keys", spoiled)
    with pytest.raises(tk.CacheStateError, match="2 keys of layer 2"):
        fresh.compress(**COMPRESS)
    assert fresh.kv.n_cells == 200


def test_no_room(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:1000])
    with pytest.raises(tk.CacheStateError, match="100 more tokens do not fit"):
        fresh.eval(licence_tokens[1000:1100])
    assert fresh.n_tokens == 1000
    fresh.compress(policy="knorm", ratio=0.5)
    fresh.eval(licence_tokens[1000:1100])  # past n_ctx tokens, within its cells
    assert fresh.n_tokens == 1100
    assert fresh.kv.n_cells == 600
    text = fresh.create_completion(licence_tokens[:1150], max_tokens=4, temperature=0)
    assert text["usage"]["prompt_tokens"] == 1150


def test_a_rollback_into_the_compressed_part(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:300])
    fresh.compress(**COMPRESS)
    fresh.n_tokens = 100
    with pytest.raises(tk.CacheStateError, match="compressed as a whole"):
        fresh.eval([1])
    fresh.n_tokens = 400
    with pytest.raises(tk.CacheStateError, match="reset"):
        fresh.eval([1])
    fresh.n_tokens = 300
    fresh.eval([1])


def test_a_cache_changed_from_outside(fresh: tk.CompressedLlama, licence_tokens: list[int]) -> None:
    fresh.eval(licence_tokens[:100])
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(fresh.ctx), 0, 90, -1)
    with pytest.raises(tk.CacheStateError, match="from outside"):
        fresh.kv.evict(random_sets(fresh, keep=50))


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(tk.InputError):
        tk.CompressedLlama(str(tmp_path / "missing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(tk.InputError):
        tk.CompressedLlama(str(tmp_path / "broken.gguf"))


def test_memory_comes_back(smollm2: str, licence_tokens: list[int], open_llm: Callable[..., Any]) -> None:
    llm = open_llm(smollm2, n_ctx=4096)
    created = llm.footprint()
    assert created.bytes_resident <= 0.02 * created.bytes_allocated
    llm.eval(licence_tokens)
    full = llm.footprint()
    assert full.bytes_resident >= full.bytes_used
    llm.compress(policy="knorm", ratio=0.75)
    small = llm.footprint()
    page = 4096
    assert small.cells == 300
    assert small.bytes_resident <= small.bytes_used + 60 * 2 * page
    llm.reset()
    assert llm.footprint().bytes_resident <= 0.02 * created.bytes_allocated
