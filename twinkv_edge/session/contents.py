"""What a session's head says about the model, the cache and the settings, and whether others are the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from ..compression import Compression
from ..errors import InputError, SessionError
from ..models.fingerprint import file_digest, fingerprint
from ..models.ggml_types import cache_type

if TYPE_CHECKING:
    from ..kv_cache import KVCache
    from ..llama import CompressedLlama

T = TypeVar("T")


@dataclass(frozen=True)
class ModelIdentity:
    """The model a cache was computed with.

    Attributes:
        name, architecture: As its GGUF says.
        path: Where it was then: a hint for finding it again, not part of its identity.
        fingerprint: See `models.fingerprint`.
        lora: Digest and scale of a LoRA adapter; "" without one.
        overrides: `kv_overrides` that changed its metadata; "" without any.
    """

    name: str
    architecture: str
    path: str
    fingerprint: str
    lora: str = ""
    overrides: str = ""

    @classmethod
    def of(cls, llm: CompressedLlama) -> ModelIdentity:
        facts = llm.facts
        try:
            lora = f"{file_digest(llm.lora_path)} x {float(llm.lora_scale)!r}" if llm.lora_path else ""
        except OSError as e:
            raise InputError(f"the LoRA adapter {llm.lora_path} can't be read: {e}") from None
        overrides = llm.kv_overrides or {}
        return cls(
            name=facts.name,
            architecture=facts.architecture,
            path=str(Path(facts.path).absolute()),
            fingerprint=fingerprint(facts.path),
            lora=lora,
            overrides=json.dumps(overrides, sort_keys=True) if overrides else "",
        )

    def check(self, path: Path, found: ModelIdentity) -> None:
        """Raises SessionError where `found`, the model at hand, is not this one."""
        if self.fingerprint != found.fingerprint:
            raise SessionError(
                f"{path} was made with another model: {self.name} ({self.fingerprint[:8]}), and this is {found.name} "
                f"({found.fingerprint[:8]}); open it with the one it was made with (then at {self.path})"
            )
        for what, ours, theirs in (
            ("LoRA adapter", self.lora, found.lora),
            ("kv_overrides", self.overrides, found.overrides),
        ):
            if ours != theirs:
                raise SessionError(
                    f"{path} was made with {what} {ours or 'none'}, and this model has {theirs or 'none'}: "
                    "open it as it was then"
                )


@dataclass(frozen=True)
class CacheKind:
    """Everything about a cache that its bytes depend on.

    Attributes:
        layers: llama.cpp's numbers of the evictable layers.
        n_head_kv, head_dim_k, head_dim_v: Of each of them.
        type_k, type_v: Names of ggml's types.
        v_transposed: V lies transposed, as it does without flash attention.
        n_caches: 2 on sliding-window models.
        rotation: Digest of the rotary parameters of all layers, frequency factors and Hadamard blocks included: cached
            keys are rotated, so other parameters (a longer context of LongRoPE, a scaling given at construction,
            LLAMA_ATTN_ROT_DISABLE) would make them other keys.
    """

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: str
    type_v: str
    v_transposed: bool
    n_caches: int
    rotation: str

    @classmethod
    def of(cls, kv: KVCache) -> CacheKind:
        first = kv.layers[0]
        rotations = [[layer.rotation.hadamard, layer.rotation.rope] for layer in kv.layers]
        return cls(
            layers=tuple(layer.il for layer in kv.layers),
            n_head_kv=first.n_head_kv,
            head_dim_k=first.head_dim_k,
            head_dim_v=first.head_dim_v,
            type_k=cache_type(first.type_k).name,
            type_v=cache_type(first.type_v).name,
            v_transposed=first.v_transposed,
            n_caches=1 if kv.n_layers == kv._tap.n_layers else 2,
            rotation=xxhash.xxh3_128(json.dumps(rotations, sort_keys=True).encode()).hexdigest(),
        )

    def check(self, path: Path, found: CacheKind) -> None:
        """Raises SessionError where `found`, the cache at hand, is of another kind."""
        if (self.type_k, self.type_v) != (found.type_k, found.type_v):
            raise SessionError(
                f"{path} holds a {self.type_k}/{self.type_v} cache, and this one is {found.type_k}/{found.type_v}: "
                f"open the model with type_k={self.type_k}, type_v={self.type_v}"
            )
        if self.v_transposed != found.v_transposed:
            raise SessionError(
                f"{path} holds a cache made {'without' if self.v_transposed else 'with'} flash attention, whose V lies "
                f"otherwise: open the model with flash_attn={not self.v_transposed}"
            )
        if self.rotation != found.rotation:
            raise SessionError(
                f"{path} holds keys that were rotated otherwise: open the model with the RoPE options, the n_ctx "
                "(where the model's RoPE depends on it) and the LLAMA_ATTN_ROT_DISABLE it had then"
            )
        for name, ours in asdict(self).items():
            if ours != (theirs := getattr(found, name)):
                raise SessionError(f"{path} holds a cache with {name} = {ours}, and this model's has {theirs}")


@dataclass(frozen=True)
class Contents:
    """The head of a session file.

    Attributes:
        created: When it was saved, UTC, as ISO 8601.
        twinkv_edge, llama_cpp_python: Versions that wrote it.
        n_tokens: Tokens of the conversation, kept or evicted.
        n_cells: Cells in use, of the head that uses most.
        boundary: Tokens that were compressed; 0: none.
        n_protected: First tokens that no eviction may take (see CompressedLlama.protect).
        tau: The threshold that was in use.
    """

    created: str
    twinkv_edge: str
    llama_cpp_python: str
    model: ModelIdentity
    cache: CacheKind
    compression: Compression
    n_tokens: int
    n_cells: int
    boundary: int
    n_protected: int
    tau: float
    metadata: dict[str, Any]

    def to_head(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_head(cls, head: dict[str, Any], path: Path) -> Contents:
        """Raises SessionError for anything that is missing, unknown or of the wrong type."""
        try:
            made = _typed(cls, {**head, "model": {}, "cache": {}, "compression": {}}, nested=True)
            made["model"] = ModelIdentity(**_typed(ModelIdentity, head["model"]))
            cache = _typed(CacheKind, head["cache"])
            if not all(type(layer) is int for layer in cache["layers"]):
                raise TypeError("layers")
            made["cache"] = CacheKind(**cache)
            made["compression"] = Compression(**head["compression"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise SessionError(
                f"{path} has a head that is not as this version writes it ({e!r}); make it again"
            ) from None
        return cls(**made)


_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "tuple[int, ...]": list, "dict[str, Any]": dict}


def _typed(cls: type[Any], values: dict[str, Any], *, nested: bool = False) -> dict[str, Any]:
    """The values of a dataclass's fields, each of its declared type; raises TypeError or KeyError."""
    names = {f.name: str(f.type) for f in fields(cls)}
    if set(values) != set(names):
        raise KeyError(*(set(values) ^ set(names)))
    for name, declared in names.items():
        wanted = _TYPES.get(declared, dict if nested else None)
        if type(values[name]) is not wanted:
            raise TypeError(f"{name} is {values[name]!r}"[:80])
        if wanted is int and not 0 <= values[name] < 1 << 31:
            raise ValueError(f"{name} is {values[name]}")
    return {k: tuple(v) if type(v) is list else v for k, v in values.items()}
