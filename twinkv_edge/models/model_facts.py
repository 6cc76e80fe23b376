"""What the package needs to know about a model, from its GGUF metadata alone: no weights are read."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import InputError
from . import architectures as arch
from .ggml_types import cache_type, row_bytes
from .gguf_header import Header, read_header
from .metadata import Metadata

_MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS; llama.cpp aborts the process beyond it
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
TAU_QK_NORM: Final = 0.85  # TwinKV paper, section 4: models that normalize keys per head
TAU_DEFAULT: Final = 0.90


class CacheLayer(NamedTuple):
    """One layer's cache: the row of a cell is `n_head_kv` heads of `head_dim_k` (K) or `head_dim_v` (V)."""

    layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    sliding: bool


@dataclass(frozen=True)
class ModelFacts:
    """One model's shape and its kind of cache. Sizes are in elements unless they are named bytes."""

    path: Path
    architecture: str
    name: str
    size_label: str
    file_type: int | None  # general.file_type, llama.cpp's LLAMA_FTYPE number
    quantization: str  # the tensor type that holds most of the weights' bytes
    weight_bytes: int

    n_layer: int
    n_embd: int
    n_ff: int  # of the widest layer; 0 if the metadata does not say
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int  # the largest, where layers differ
    n_head_kv_by_layer: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int

    n_rot: int  # dimensions of a head that RoPE rotates
    rope_freq_base: float
    rope_scaling_type: str  # "none", "linear", "yarn", "longrope", ...
    rope_scaling_factor: float
    rope_orig_ctx: int  # context length before scaling; n_ctx_train if the metadata does not say
    has_rope_factors: bool  # rope_freqs.weight (Llama 3) or rope_factors_long/short.weight (LongRoPE)

    has_qk_norm: bool
    n_swa: int  # sliding window in tokens; 0 when llama.cpp uses none for this model
    cache_layers: tuple[CacheLayer, ...]  # layers that own a KV cache; empty if there is none
    is_recurrent: bool
    is_hybrid: bool
    is_mla: bool
    is_encoder: bool  # encoder-only, encoder-decoder or diffusion: no causal KV cache of its own
    is_m_rope: bool
    is_alibi: bool
    is_part: bool  # a projector or draft head, not a model of its own
    has_indexer: bool  # a second cache of indexer keys (sparse attention)
    shares_cache: bool  # later layers attend to the cache of earlier ones (Gemma 3n, Gemma 4)

    @property
    def default_tau(self) -> float:
        """Similarity threshold of the repair: 0.85 with QK-norm, otherwise 0.90."""
        return TAU_QK_NORM if self.has_qk_norm else TAU_DEFAULT

    def bytes_per_token(self, type_k: str | int = "f16", type_v: str | int = "f16") -> tuple[int, int]:
        """Bytes of K and of V that one token takes in the caches of all layers, sliding ones included.

        Raises InputError for a type that llama.cpp does not take, or whose block does not divide a head.
        """
        return cell_bytes(self.cache_layers, type_k, type_v, is_mla=self.is_mla)


def cell_bytes(
    layers: tuple[CacheLayer, ...], type_k: str | int, type_v: str | int, *, is_mla: bool = False
) -> tuple[int, int]:
    """Bytes of K and of V in one cell of each of `layers`; MLA caches keep no V."""
    kind_k, kind_v = cache_type(type_k), cache_type(type_v)
    for layer in layers:  # llama.cpp refuses a context whose heads are not whole blocks
        row_bytes(kind_k, layer.head_dim_k)
        row_bytes(kind_v, layer.head_dim_v)
    k = sum(row_bytes(kind_k, layer.n_head_kv * layer.head_dim_k) for layer in layers)
    v = sum(row_bytes(kind_v, layer.n_head_kv * layer.head_dim_v) for layer in layers)
    return k, 0 if is_mla else v


def facts(path: str | os.PathLike[str]) -> ModelFacts:
    """Facts about the GGUF model at `path`; of a model split over several files, the first.

    Takes milliseconds: neither weights nor vocabulary are read. Raises InputError when the file is missing,
    unreadable, broken, incomplete or not a language model.
    """
    header = read_header(path)
    parts = (header, *other_splits(header))
    kind = header.metadata.get("general.type", "model")
    architecture = header.metadata.get("general.architecture")
    if kind not in ("model", "mmproj") or not isinstance(architecture, str):
        raise InputError(f"{header.path} holds no language model (type {kind!r}); give the model's GGUF file")
    meta = Metadata(header, architecture)
    is_part = architecture in arch.PARTS or kind == "mmproj"
    n_layer = 0 if is_part else meta.count("block_count") - meta.count("nextn_predict_layers", 0)
    if not is_part and not 0 < n_layer <= _MAX_LAYERS:
        raise meta.bad("block_count", meta.get("block_count"))
    n_embd = meta.count("embedding_length", 0 if is_part else None)
    heads = _heads(meta, n_layer, n_embd)
    kinds = _kinds(meta, n_layer, is_part)
    sliding, n_swa = _sliding_layers(meta, n_layer)
    names = [name for part in parts for name in part.tensors]
    file_type = header.metadata.get("general.file_type")
    return ModelFacts(
        path=header.path,
        architecture=_one_line(architecture),
        name=_one_line(header.metadata.get("general.name", header.path.stem)),
        size_label=_one_line(header.metadata.get("general.size_label", "")),
        file_type=file_type if type(file_type) is int else None,
        quantization=_most_common_type(parts),
        weight_bytes=sum(part.weight_bytes for part in parts),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=meta.count("feed_forward_length", 0),
        n_vocab=meta.n_vocab(),
        n_ctx_train=meta.count("context_length", 0 if is_part else None),
        n_head=max(heads.query, default=0),
        n_head_kv=max(heads.kv, default=0),
        n_head_kv_by_layer=heads.kv,
        head_dim_k=heads.dim_k,
        head_dim_v=heads.dim_v,
        has_rope_factors=any(name.startswith(("rope_freqs.", "rope_factors_")) for name in names),
        has_qk_norm=any(name.endswith("attn_k_norm.weight") for name in names),
        n_swa=n_swa,
        cache_layers=_cache_layers(meta, heads, sliding, kinds),
        shares_cache=_first_sharing_layer(meta, n_layer) < n_layer,
        **(_rope(meta, heads.dim_k) | kinds),
    )


class _Heads(NamedTuple):
    query: tuple[int, ...]  # by layer
    kv: tuple[int, ...]
    dim_k: int
    dim_v: int


def _heads(meta: Metadata, n_layer: int, n_embd: int) -> _Heads:
    """Numbers and sizes of heads, with llama.cpp's defaults where the metadata is silent."""
    query = meta.per_layer("attention.head_count", n_layer, 0)
    silent = meta.get("attention.head_count_kv") is None
    kv = query if silent else meta.per_layer("attention.head_count_kv", n_layer, 0)
    if any(n_kv and n % n_kv for n, n_kv in zip(query, kv, strict=True)):
        raise meta.bad("attention.head_count_kv", kv)  # ggml asserts on it: the process would be gone
    default = n_embd // query[0] if query and query[0] else 0
    return _Heads(query, kv, meta.count("attention.key_length", default), meta.count("attention.value_length", default))


def _rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    scaling = meta.text("rope.scaling.type", "none")
    if scaling not in _ROPE_SCALINGS:  # llama.cpp asserts on it
        raise meta.bad("rope.scaling.type", scaling)
    n_ctx_train = meta.count("context_length", 0)
    return {
        "n_rot": meta.count("rope.dimension_count", head_dim),
        "rope_freq_base": meta.real("rope.freq_base", 10000.0),
        "rope_scaling_type": scaling,
        "rope_scaling_factor": meta.real("rope.scaling.factor", 1.0) or 1.0,
        "rope_orig_ctx": meta.count("rope.scaling.original_context_length", n_ctx_train),
    }


def _most_common_type(parts: tuple[Header, ...]) -> str:
    """The tensor type that holds the most bytes."""
    by_type: Counter[str] = Counter()
    for part in parts:
        for tensor in part.tensors.values():
            by_type[tensor.kind.name] += tensor.n_bytes
    return max(by_type, key=lambda name: by_type[name], default="")


def _one_line(text: object) -> str:
    """Free text of the file, fit for a message of one line."""
    return " ".join(str(text)[:200].split())


def _kinds(meta: Metadata, n_layer: int, is_part: bool) -> dict[str, bool]:
    """The flags that say whether, and why not, the cache can be rewritten."""
    name = meta.architecture
    sections = meta.get("rope.dimension_sections")
    m_rope = isinstance(sections, tuple) and [isinstance(n, int) and n > 0 for n in sections[:2]] == [True] * 2
    state = meta.has("ssm.", "wkv.", "shortconv.", "kda.", "attention.recurrent_layers")
    hybrid = name in arch.HYBRID or (state and name not in arch.RECURRENT)
    encoder = name in arch.WITHOUT_CACHE or name in arch.ENCODER_DECODER
    alibi = name in arch.ALIBI or meta.real("attention.max_alibi_bias", 0.0) > 0.0
    return {
        "is_part": is_part,
        "is_recurrent": name in arch.RECURRENT,
        "is_hybrid": hybrid,
        "is_mla": meta.count("attention.kv_lora_rank", 0) > 0,
        "is_encoder": encoder or meta.get("attention.causal") is False,
        "is_m_rope": name in arch.M_ROPE or m_rope,
        "is_alibi": alibi or (name == "baichuan" and n_layer == 40),  # the 13B; the 7B rotates
        "has_indexer": meta.has("attention.indexer."),
    }


def _sliding_layers(meta: Metadata, n_layer: int) -> tuple[tuple[bool, ...], int]:
    """Which layers have a sliding window in llama.cpp, and the window in tokens."""
    rule = arch.SLIDING.get(meta.architecture)
    none = (False,) * n_layer, 0
    if rule is None or (meta.architecture == "exaone4" and n_layer != 64):
        return none
    given = meta.count("attention.sliding_window", rule.window)
    window = rule.window if rule.fixed and (given > 0 or meta.architecture == "llama4") else given
    if window == 0 or (meta.architecture == "llama4" and given == 0):
        return none
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        layers = meta.per_layer("attention.sliding_window_pattern", n_layer, 0)
        return tuple(bool(v) for v in layers), window
    period = meta.count("attention.sliding_window_pattern", rule.period)
    if period == 0:
        return (True,) * n_layer, window
    dense = 0 if rule.dense_first else period - 1
    return tuple(i % period != dense for i in range(n_layer)), window


def _first_sharing_layer(meta: Metadata, n_layer: int) -> int:
    """The first layer without a cache of its own: it and all later ones attend to earlier layers' caches."""
    if meta.architecture == "gemma3n":
        return min(20, n_layer)  # llama.cpp's constant; the files do not say
    if meta.architecture == "gemma4":
        return max(n_layer - meta.count("attention.shared_kv_layers", 0), 0)
    return n_layer


def _cache_layers(
    meta: Metadata, heads: _Heads, sliding: tuple[bool, ...], kinds: dict[str, bool]
) -> tuple[CacheLayer, ...]:
    if any(kinds[k] for k in ("is_recurrent", "is_hybrid", "is_encoder", "is_part")):
        return ()
    if not max(heads.kv) or not heads.dim_k or not heads.dim_v:
        raise meta.bad("attention.head_count", meta.get("attention.head_count"))
    k_swa = meta.count("attention.key_length_swa", heads.dim_k)
    v_swa = meta.count("attention.value_length_swa", heads.dim_v)
    return tuple(
        CacheLayer(i, heads.kv[i], k_swa if slides else heads.dim_k, v_swa if slides else heads.dim_v, slides)
        for i, slides in enumerate(sliding[: _first_sharing_layer(meta, len(heads.kv))])
    )


def other_splits(header: Header) -> tuple[Header, ...]:
    """Headers of the other files of a model that `llama-gguf-split` divided."""
    n = header.metadata.get("split.count", 0)
    if type(n) is not int or n <= 1:
        return ()
    ending = f"-00001-of-{n:05d}.gguf"  # llama.cpp loads a split model by its first file only
    if header.metadata.get("split.no") != 0 or not header.path.name.endswith(ending):
        raise InputError(f"{header.path} is one part of a split model; give the first, *-00001-of-*.gguf")
    stem = header.path.name[: -len(ending)]
    names = (f"{stem}-{i:05d}-of-{n:05d}.gguf" for i in range(2, n + 1))
    return tuple(read_header(header.path.with_name(name)) for name in names)
