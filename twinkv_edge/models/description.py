"""What `twinkv-edge models MODEL.gguf` says: a model's shape, can it be evicted from, what does it cost."""

from __future__ import annotations

import os
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from .footprint import Estimate, estimate
from .free_memory import free_memory
from .model_facts import ModelFacts, facts
from .rewritable import why_not_rewritable

_LENGTHS: Final = (2048, 8192, 32768, 131072)
_TYPES: Final = ("f16", "q8_0", "q4_0")


def describe(
    path: str | os.PathLike[str],
    n_ctx: int | None = None,
    *,
    ratio: float = 0.5,
    target_tokens: int | None = None,
) -> dict[str, Any]:
    """Everything the command prints, ready for JSON. Sizes in bytes.

    n_ctx    the one context length to estimate; None: usual lengths up to the trained one
    ratio, target_tokens   what the columns "after eviction" are for

    Keys: `model` (facts), `supported`, `reason` (why not, or None), `free` (bytes, or None), `estimates`
    (one per length and cache type; empty for a model without a KV cache). Raises InputError as `facts` does.
    """
    model = facts(path)
    reason = why_not_rewritable(model)
    free = free_memory()
    lengths = [n_ctx] if n_ctx is not None else _usual_lengths(model.n_ctx_train)
    estimates = []
    for n in lengths if model.cache_layers else []:
        for kind in _TYPES:
            estimates += _row(model, n, kind, ratio, target_tokens, free)
    return {
        "model": _model_dict(model),
        "supported": reason is None,
        "reason": reason,
        "free": free,
        "estimates": [row.as_dict() for row in estimates],
    }


def _usual_lengths(trained: int) -> list[int]:
    return sorted({n for n in _LENGTHS if n <= trained} | {trained})


def _row(
    model: ModelFacts, n_ctx: int, kind: str, ratio: float, target_tokens: int | None, free: int | None
) -> list[Estimate]:
    """The estimate for one length and cache type; none if llama.cpp would refuse the type for this model."""
    n_tokens = min(n_ctx, model.n_ctx_train)
    options: dict[str, Any] = {"ratio": ratio, "target_tokens": target_tokens, "free": free}
    try:
        return [estimate(model, n_ctx, n_tokens, type_k=kind, type_v=kind, **options)]
    except InputError:
        if kind == "f16":  # not the type's fault
            raise
        return []


def _model_dict(model: ModelFacts) -> dict[str, Any]:
    """The facts without what only repeats: one entry per layer becomes a number or a short list."""
    kinds = ("recurrent", "hybrid", "mla", "encoder", "m_rope", "alibi", "part")
    k, v = model.bytes_per_token() if model.cache_layers else (0, 0)
    return {
        "path": str(model.path),
        "name": model.name,
        "architecture": model.architecture,
        "size_label": model.size_label,
        "quantization": model.quantization,
        "weight_bytes": model.weight_bytes,
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
        "n_vocab": model.n_vocab,
        "n_ctx_train": model.n_ctx_train,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "head_dim_k": model.head_dim_k,
        "head_dim_v": model.head_dim_v,
        "rope_freq_base": model.rope_freq_base,
        "rope_scaling_type": model.rope_scaling_type,
        "n_swa": model.n_swa,
        "n_sliding_layers": sum(layer.sliding for layer in model.cache_layers),
        "has_qk_norm": model.has_qk_norm,
        "default_tau": model.default_tau,
        "bytes_per_token_f16": k + v,
        "kinds": [kind for kind in kinds if getattr(model, f"is_{kind}")],
    }


def render(description: dict[str, Any]) -> Group:
    """The same for people: a table of the model and a table of what it costs."""
    model = description["model"]
    about = Table(title=Text(model["name"]), show_header=False, title_justify="left")
    rows = {
        "architecture": " ".join(x for x in (model["architecture"], model["size_label"]) if x),
        "weights": f"{_mb(model['weight_bytes'])} MB, mostly {model['quantization']}",
        "layers": _layers(model),
        "heads": f"{model['n_head']} query, {model['n_head_kv']} K/V of {model['head_dim_k']}",
        "trained length": f"{model['n_ctx_train']} tokens",
        "cache": f"{model['bytes_per_token_f16'] / 1024:.1f} KB per token in f16",
        "tau": f"{model['default_tau']:.2f} ({'QK-norm' if model['has_qk_norm'] else 'no QK-norm'})",
        "eviction": "yes" if description["supported"] else f"no: {description['reason']}",
    }
    for key, value in rows.items():
        about.add_row(key, Text(value))  # as it is: a file's words are not rich's markup
    tables = [about]
    if description["estimates"]:
        tables.append(_cost_table(description))
    return Group(*tables)


def _layers(model: dict[str, Any]) -> str:
    n = model["n_sliding_layers"]
    return f"{model['n_layer']}" + (f", {n} with a window of {model['n_swa']}" if n else "")


def _cost_table(description: dict[str, Any]) -> Table:
    free = description["free"]
    title = "memory in MB" + (f", {_mb(free)} free" if free is not None else "")
    table = Table(title=title, title_justify="left")
    for name in ("n_ctx", "cache type", "cache", "after eviction", "tokens kept", "compute", "all", "fits"):
        table.add_column(name, justify="left" if name in ("cache type", "fits") else "right")
    for row in description["estimates"]:
        sizes = (row["cache_allocated"], row["cache_kept"])
        fits = {True: "yes", False: f"no: {row['suggestion']}", None: "?"}[row["fits"]]
        table.add_row(
            str(row["n_cells"]),
            row["plan"]["type_k"],
            *map(_mb, sizes),
            str(row["n_kept"]),
            _mb(row["compute"]),
            _mb(row["needed"]),
            fits,
        )
    return table


def _mb(n: int) -> str:
    return f"{n / (1 << 20):.0f}" if n >= 100 << 20 else f"{n / (1 << 20):.1f}"
