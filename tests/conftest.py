"""Models, texts and the masked reference that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

import twinkv_edge as tk
from twinkv_edge import pipeline, policies, views

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2() -> str:
    return str(tk.models.default_model())


@pytest.fixture(scope="session")
def qwen3_tiny() -> str:
    """Random weights, Qwen3 architecture, no tokenizer: feed ids."""
    return str(DATA / "qwen3-tiny-f32.gguf")


@pytest.fixture(scope="session")
def golden() -> npt.NDArray[Any]:
    """KVPress's scores on the embedded model and the Apache licence (see tests/data/README.md)."""
    return np.load(DATA / "smollm2-apache2_kvpress.npz")


@pytest.fixture(scope="session")
def golden_qwen3() -> npt.NDArray[Any]:
    return np.load(DATA / "qwen3-tiny_kvpress.npz")


@pytest.fixture(scope="session")
def licence_tokens(golden: Any) -> list[int]:
    """1200 tokens of prose for the embedded model's vocabulary."""
    return golden["tokens"].tolist()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A tiny model of that shape with F32 weights, written once."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(like: str) -> str:
        path = folder / f"{like}.gguf"
        return str(path if path.exists() else tk.models.random_model(like, path=path, quant="f32"))

    return make


def prompt(n: int, seed: int = 0, n_vocab: int = 500) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(1, n_vocab, n).tolist()


CAPTURED = ["snapkv", "tova", "expected_attention", "h2o"]  # policies that score with what the tap captured


@pytest.fixture(scope="session")
def evaluated(smollm2: str, licence_tokens: list[int]) -> Iterator[tk.CompressedLlama]:
    """The embedded model after the golden prompt, everything captured. Tests read it and leave it as it is."""
    yield from _evaluated(smollm2, licence_tokens)


@pytest.fixture(scope="session")
def evaluated_qwen3(qwen3_tiny: str, golden_qwen3: Any) -> Iterator[tk.CompressedLlama]:
    yield from _evaluated(qwen3_tiny, golden_qwen3["tokens"].tolist())


def _evaluated(path: str, tokens: list[int]) -> Iterator[tk.CompressedLlama]:
    llm = tk.CompressedLlama(path, n_ctx=1280, n_threads=2)
    llm.capture_for(*CAPTURED)
    llm.eval(tokens)
    yield llm
    llm.close()


def cache_scores(llm: tk.CompressedLlama, policy: str, **options: Any) -> npt.NDArray[np.float32]:
    """Scores of what the cache holds now, float32 [L, H, n]."""
    return pipeline.scores(llm.kv, policies.create(policy, options))


@pytest.fixture(scope="session")
def licence_text(smollm2: str, licence_tokens: list[int]) -> str:
    """About 640 tokens of prose: a haystack."""
    vocabulary = llama_cpp.Llama(smollm2, vocab_only=True, verbose=False)
    text = vocabulary.detokenize(licence_tokens[:640]).decode()
    vocabulary.close()
    return text


def layer_view(llm: tk.CompressedLlama, index: int) -> policies.LayerView:
    """A layer whose heads hold the same number of tokens, as policies see it."""
    (part,) = views.parts(llm.kv, index)
    return part.view


@pytest.fixture
def open_llm() -> Iterator[Callable[..., tk.CompressedLlama]]:
    """Opens models and closes them when the test ends."""
    opened: list[tk.CompressedLlama] = []

    def make(model_path: str, **kwargs: Any) -> tk.CompressedLlama:
        kwargs.setdefault("n_ctx", 1024)
        kwargs.setdefault("n_threads", 2)
        opened.append(tk.CompressedLlama(model_path, **kwargs))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def logits(llm: tk.CompressedLlama) -> npt.NDArray[np.float32]:
    """Of the last token decoded."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (llm.n_vocab(),)).copy()


def decode(llm: tk.CompressedLlama, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Decodes tokens one by one; their logits, float32 [len(tokens), vocabulary]."""
    rows = []
    for token in tokens:
        llm.eval([token])
        rows.append(logits(llm))
    return np.array(rows)


def random_sets(llm: tk.CompressedLlama, keep: int, seed: int = 0) -> npt.NDArray[np.bool_]:
    """A different random set of `keep` cells for every layer and head, bool [L, H, n]."""
    shape = (llm.kv.n_layers, llm.kv.n_head_kv, llm.kv.n_cells)
    order = np.random.default_rng(seed).random(shape).argsort(axis=-1)
    return order < keep


def hide(llm: tk.CompressedLlama, retained: npt.NDArray[np.bool_] | None) -> None:
    """Masks what is not retained, per head, at the attention nodes; None: nothing."""
    for layer, facts in enumerate(llm.kv.layers):
        hidden = np.zeros((facts.n_head_kv, 0)) if retained is None else ~retained[layer]
        llm._tap.hide(facts.tap_index, hidden.astype(np.uint8)[None])


def masked_run(llm: tk.CompressedLlama, retained: npt.NDArray[np.bool_], tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits of a run that keeps every cell but hides the evicted ones, per head; the cache is as before afterwards."""
    n = llm.n_tokens
    hide(llm, retained)
    try:
        return decode(llm, tokens)
    finally:
        hide(llm, None)
        llm.n_tokens = n
        llm.kv.rollback(n)
