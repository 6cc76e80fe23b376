"""`twinkv-edge models`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import AsJson
from .output import megabytes, print_json

_SHOWN_TYPES = ("f16", "q8_0", "q4_0")


def models(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file (default: the embedded model).", metavar="[MODEL.gguf]")
    ] = None,
    json: AsJson = False,
) -> None:
    """Describe the embedded model, or a GGUF file: shape, cost of its cache, and whether it can be evicted from."""
    from ..models import default_model

    found = describe(model if model is not None else default_model())
    found["embedded"] = model is None
    if json:
        print_json(found)
        return
    for name, value in _lines(found):
        print(f"{name:<15} {value}")


def describe(path: Path) -> dict[str, Any]:
    """What `models` says of a file.

    Raises:
        InputError: The file is missing or no usable GGUF.
    """
    from ..errors import InputError
    from ..models import facts, why_not_rewritable
    from ..models.ggml_types import CACHE_TYPES

    model = facts(path)
    bytes_per_token: dict[str, int | None] = {}
    for name in CACHE_TYPES:
        try:
            bytes_per_token[name] = sum(model.bytes_per_token(name, name))
        except InputError:  # a head that is no whole number of this type's blocks
            bytes_per_token[name] = None
    reason = why_not_rewritable(model)
    return {
        "path": str(path),
        "name": model.name,
        "architecture": model.architecture,
        "size": model.size_label,
        "quantization": model.quantization,
        "weight_bytes": model.weight_bytes,
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
        "n_vocab": model.n_vocab,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "head_dim_k": model.head_dim_k,
        "head_dim_v": model.head_dim_v,
        "n_ctx_train": model.n_ctx_train,
        "has_qk_norm": model.has_qk_norm,
        "default_tau": model.default_tau,
        "sliding_window": model.n_swa,
        "sliding_layers": sum(layer.sliding for layer in model.cache_layers),
        "cache_bytes_per_token": bytes_per_token,
        "evictable": reason is None,
        "why_not_evictable": reason,
    }


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    per_token = found["cache_bytes_per_token"]
    n_ctx = found["n_ctx_train"]
    heads = f"{found['n_head']} query heads, {found['n_head_kv']} KV heads of {found['head_dim_k']}"
    if found["head_dim_v"] != found["head_dim_k"]:
        heads += f" (values {found['head_dim_v']})"
    cache = [
        (f"cache, {name}", f"{per_token[name]:,} bytes per token, {megabytes(per_token[name] * n_ctx)} MB at {n_ctx:,}")
        for name in _SHOWN_TYPES
        if per_token[name]
    ]
    norm = "its keys are normalized" if found["has_qk_norm"] else "its keys are not normalized"
    lines = [
        ("model", found["name"] + (" (embedded)" if found.get("embedded") else "")),
        ("file", found["path"]),
        ("architecture", f"{found['architecture']}, {found['n_layer']} layers, {heads}"),
        ("weights", f"{megabytes(found['weight_bytes'])} MB, mostly {found['quantization']}"),
        ("trained length", f"{n_ctx:,} tokens"),
        *cache,
        ("tau", f"{found['default_tau']:.2f} by default: {norm}"),
    ]
    if found["sliding_window"]:
        lines.append(
            (
                "sliding window",
                f"{found['sliding_window']:,} tokens in {found['sliding_layers']} layers: left as they are",
            )
        )
    lines.append(("eviction", "yes" if found["evictable"] else f"no: it {found['why_not_evictable']}"))
    return lines
