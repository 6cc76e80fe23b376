"""KVPress as a configuration of `bench memory`, in a process of its own: the protocol of `memory_child`, on PyTorch.

It reads the same GGUF file through transformers, which dequantizes it into bfloat16: two bytes a number of cache, as
llama.cpp's f16. Its weights and libraries are therefore not ours: a job of kind "weights" measures them, and they are
what is subtracted.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import models
from .._install import native
from .clock import median
from .memory_child import process_bytes, prompt, reset_peak

NEEDS = ("kvpress", "torch", "transformers")
INSTALL = "pip install 'twinkv-edge[peers]'"
#: what both transformers' GGUF reader and KVPress know
ARCHITECTURES = ("llama", "phi3", "qwen2", "qwen3")


def missing() -> list[str]:
    """The packages that are not installed; none is imported to find out."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def why_not(model: str | Path) -> str | None:
    """Why KVPress cannot run this model here, or None where it can."""
    absent = missing()
    if absent:
        return f"{' and '.join(absent)} not installed: {INSTALL}"
    architecture = models.facts(model).architecture
    if architecture not in ARCHITECTURES:
        return f"it is run on {', '.join(ARCHITECTURES)} models; this one is {architecture}"
    return None


def open_model(job: dict[str, Any]) -> Any:
    """The file as a transformers model in bfloat16, what its reading took given back to the system."""
    import kvpress  # noqa: F401 (wraps attention for all models made from here on, and is part of the libraries)
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = Path(job["model"])
    facts = models.facts(path)
    # transformers reads no attention.key_length; the other configurations have no such field
    shape = {"head_dim": facts.head_dim_k} if facts.architecture in ("llama", "qwen3") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        **shape,
    ).eval()
    trim()
    return model


def trim() -> None:
    """Gives freed memory back: kept by malloc, it would be reused later and hide what that costs."""
    gc.collect()
    native.trim_heap()


def cache_bytes(cache: Any) -> int:
    """Bytes behind the K and V tensors of all layers, whether views of them are smaller or not."""
    rows = [t for layer in cache.layers if layer.keys is not None for t in (layer.keys, layer.values)]
    return sum(t.untyped_storage().nbytes() for t in rows)


class Life:
    """A cache over the life of a session; `notes` is what `memory_child` calls life."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.notes: list[dict[str, Any]] = []
        self.at_most = 0

    def note(self, stage: str, tokens: int) -> None:
        held = cache_bytes(self.cache)
        self.at_most = max(self.at_most, held)
        cells = max((layer.get_seq_length() for layer in self.cache.layers), default=0)
        self.notes.append(
            {"stage": stage, "tokens": tokens, "cells": cells, "process": process_bytes("VmRSS"), "cache": held}
        )


def prefill(model: Any, ids: Any, ratio: float, life: Life) -> float:
    """Reads the prompt under KnormPress as KVPress's own pipeline does: one forward, without the output layer.

    Every layer's cache is evicted as soon as the layer has run; it is noted just before, when it is largest.

    Args:
        ids: Token ids, int64 [1, n].
        ratio: Fraction removed.

    Returns:
        Seconds spent choosing and moving rows.
    """
    import kvpress

    press = kvpress.KnormPress(compression_ratio=ratio)
    compress, spent = press.compress, 0.0

    def watched(*args: Any) -> Any:
        nonlocal spent
        life.note("prefill", ids.shape[1])
        began = time.perf_counter()
        kept = compress(*args)
        spent += time.perf_counter() - began
        return kept

    press.compress = watched
    with press(model):
        model.model(input_ids=ids, past_key_values=life.cache)
    return spent


def decode(model: Any, tokens: list[int], n_after: int, life: Life) -> list[float]:
    """Milliseconds of each of n_after tokens, at their true positions after the prompt."""
    import torch

    spent = []
    for i in range(n_after):
        start = time.perf_counter()
        position = torch.tensor([[len(tokens) + i]])
        model(input_ids=torch.tensor([[tokens[i % len(tokens)]]]), past_key_values=life.cache, position_ids=position)
        spent.append(1e3 * (time.perf_counter() - start))
        if i % 64 == 63:
            life.note("decode", len(tokens) + i + 1)
    return spent


def measure(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import DynamicCache

    model = open_model(job)
    life = Life(DynamicCache())
    with torch.inference_mode():
        life.note("created", 0)
        tokens = prompt(SimpleNamespace(n_vocab=lambda: model.config.vocab_size), job["n_tokens"])
        reset_peak()
        began = time.perf_counter()
        evicting = prefill(model, torch.tensor([tokens]), job["compression"]["ratio"], life)
        reading = time.perf_counter() - began - evicting
        peak = process_bytes("VmHWM")
        life.note("prefill", len(tokens))
        life.note("evicted", len(tokens))
        spent = decode(model, tokens, job["n_after"], life)
        life.note("end", len(tokens) + job["n_after"])
    return {
        "life": life.notes,
        "peak_prefill": peak,
        "peak_eviction": None,  # it happens within the prefill
        "prefill_s": reading,
        "evict_s": evicting,
        "moved_s": None,
        "decode_ms": median(spent),
        "allocated": life.at_most,  # tensors grow as they need to; nothing is set aside
    }


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """What the process takes with the weights and libraries, and one token read."""
    import torch
    from transformers import DynamicCache

    model = open_model(job)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1]]), past_key_values=DynamicCache())
    trim()
    return {"process": process_bytes("VmRSS")}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps((weights if task["kind"] == "weights" else measure)(task)))
